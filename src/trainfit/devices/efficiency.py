"""The constants of the roofline: few, named, the same for every model.

`benchmarks/calibrate.py` fits those marked "Fitted" on published step times and prints this table; the others
are facts about the hardware or about PyTorch, with their reason, or assumed. A device may have its own
(`Device.constants`), which is why they are defined beside the device table; `costs/constants.py` says which
of them hold for a device.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """How much of a device's datasheet an eager PyTorch step gets."""

    # Matrix products -------------------------------------------------------------------------------------
    best_share: float = 0.85
    """Of the peak FLOP/s: the fastest matrix product, where the device table has no measured figure."""
    in_step_share: float = 0.79
    """Of the fastest product's speed, for large products inside a step: colder caches, lower clocks under
    sustained load. Fitted."""
    simt_share: float = 0.85
    """Of the float32 peak, for products without tensor cores."""
    shared_lanes_share: float = 0.41
    """The same on chips whose datasheet counts lanes twice that also do the integer work (GA10x, Ada and
    consumer Blackwell). Fitted."""
    tile_fill: float = 32.0
    """Elements of the summed dimension that filling and draining a tile's pipeline costs. Fitted."""
    convolution_share: float = 0.83
    """A convolution's products against plain ones: addresses have to be computed. Fitted."""
    grouped_convolution_share: float = 0.53
    """The same for convolutions in groups, for which the libraries have fewer kernels. Fitted."""
    depthwise_flops: float = 12.0
    """FLOPs per cycle and multiprocessor for convolutions with few channels per group, which tensor cores
    do not do. Fitted."""
    depthwise_float32_flops: float = 1.15
    """The same in float32 with channels last, for which cuDNN has no good kernel. Fitted."""
    attention_share: float = 0.64
    """Of what a large product gets, for the forward of fused attention. Fitted."""
    attention_backward_share: float = 0.39
    """The same for its backward. Fitted."""
    efficient_attention_share: float = 0.93
    """The memory-efficient kernel against the flash kernel. Fitted."""

    # Memory ----------------------------------------------------------------------------------------------
    stream_share: float = 0.80
    """Of the bandwidth, for kernels that read and write straight through. Fitted."""
    reduction_share: float = 0.86
    """The same for reductions, norms and softmax. Fitted."""
    strided_share: float = 0.90
    """For copies that transpose. Fitted."""
    irregular_share: float = 0.12
    """For gathers, scatters and sorts. Fitted."""
    list_share: float = 0.90
    """For kernels over lists of tensors (foreach and fused optimizers). Fitted."""
    cache_gain: float = 4.0
    """How much faster than memory the last-level cache is, for what is still in it. Fitted."""
    kernel_seconds: float = 1.9e-6
    """From a kernel's start to its end if it has nothing to do. Fitted."""

    # The host --------------------------------------------------------------------------------------------
    forward_op: float = 9e-6
    """Python, the dispatcher and autograd for one operator of the forward. Assumed, as all of the host is: in
    no published row that is fitted on does the GPU wait for it, and hosts differ."""
    backward_op: float = 7e-6
    """Autograd's engine for one operator of the backward. Assumed."""
    optimizer_op: float = 7e-6
    view_op: float = 2.5e-6
    module_call: float = 3e-6
    tensor: float = 0.4e-6
    """For every further tensor in the list of a foreach operator."""
    region_call: float = 1e-3
    region_op: float = 110e-6
    """Python of our own for a region that is followed, and for each op in it."""
    checkpoint_call: float = 0.42e-3
    checkpoint_op: float = 16e-6
    """The same of torch, for a region under `torch.utils.checkpoint` alone. `benchmarks/executor_time.py`
    measures the four."""
    reload: float = 0.0
    """On a CPU: bringing Python's own data and code back after an operator has filled the core's cache."""
    cache_bytes: float = 0.0
    """On a CPU: the size of that cache."""
    launch: float = 5e-6
    """From the host's call to the kernel's start on an idle GPU."""

    uncertainty: float = 0.15
    """The relative error that four of five published test rows stay within, all of them on devices that
    other rows were fitted on."""
    uncalibrated_uncertainty: float = 0.70
    """The same for other NVIDIA devices. Shares of the peak do not carry over: of 29 published steps on an
    H100 and an H200, of more than one sample each, four of five are within 0.59 to 1.7 times the prediction,
    although the fastest matrix product of the H100 is known."""
    foreign_uncertainty: float = 2.20
    """The same for devices of other makers, whose kernels are others: four of five published steps on an
    MI325X (13 were tried) take up to 3.2 times as long as predicted. No row of theirs was fitted on."""
