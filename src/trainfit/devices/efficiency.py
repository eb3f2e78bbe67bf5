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
    in_step_share: float = 1.0
    """Of the fastest product's speed, for large products inside a step: colder caches, lower clocks under
    sustained load. Fitted."""
    tf32_share: float = 0.67
    """Of that speed, for float32 products that are rounded to TF32. Fitted."""
    simt_share: float = 0.85
    """Of the float32 peak, for products without tensor cores."""
    shared_lanes_share: float = 0.521
    """The same on chips whose datasheet counts lanes twice that also do the integer work (GA10x, Ada and
    consumer Blackwell). Fitted."""
    tile_fill: float = 32.0
    """Elements of the summed dimension that filling and draining a tile's pipeline costs. Fitted."""
    unaligned_share: float = 0.985
    """Of the speed, for products on tensor cores whose rows do not begin at multiples of 16 bytes: channels
    or a vocabulary that 8 does not divide. Fitted."""
    convolution_share: float = 0.985
    """A convolution's products against plain ones: addresses have to be computed. Fitted."""
    grouped_convolution_share: float = 0.509
    """The same for convolutions in groups, for which the libraries have fewer kernels. Fitted."""
    grouped_channels_last_share: float = 1.0
    """The same with channels last. Fitted."""
    narrow_groups_gain: float = 3.0
    """How much faster groups of fewer than 32 channels are than their tiles would be, where 32 divides their
    number: there are kernels that do several of them at once. Fitted."""
    odd_groups_share: float = 0.243
    """Of the speed of plain products, for groups with channels last whose number 32 does not divide: there
    are no kernels on tensor cores for them. Fitted."""
    plain_convolution_share: float = 0.75
    """The same without tensor cores, where no Winograd transformation helps."""
    winograd_gain: float = 1.8
    """How much faster 3 x 3 filters are there with it: 2.25 times fewer multiplications with the smallest
    tiles, less what transforming costs."""
    depthwise_cycles: float = 0.694
    """Cycles of a multiprocessor for each element of a convolution that has filters of its own for every
    channel, which tensor cores do not do. Fitted."""
    depthwise_tap_cycles: float = 0.222
    """The same for each tap of the filter. Fitted."""
    depthwise_last_cycles: float = 2.03
    """Per element, with channels last: other kernels. Fitted."""
    depthwise_last_tap_cycles: float = 0.0519
    """Per tap, with channels last. Fitted."""
    depthwise_float32_waste: float = 197.0
    """In float32 with channels last cuDNN does them as products of whole tiles of channels: products that are
    computed for each that is needed. Fitted."""
    attention_share: float = 0.595
    """Of what a large product gets, for the forward of fused attention. Fitted."""
    attention_backward_share: float = 0.427
    """The same for its backward. Fitted."""
    efficient_attention_share: float = 0.541
    """The memory-efficient kernel against the flash kernel. Fitted."""
    score_cycles: float = 0.0399
    """Cycles of a multiprocessor that a score takes besides the products: an exponential, a sum. Fitted."""
    dropped_score_cycles: float = 0.158
    """The same for the random number that dropout draws for it. Fitted."""

    # Memory ----------------------------------------------------------------------------------------------
    memory_share: float = 1.0
    """Of all the shares below: what an architecture gets less of its datasheet's bandwidth than others."""
    stream_share: float = 0.92
    """Of the bandwidth, for kernels that read and write straight through. Fitted."""
    reduction_share: float = 0.863
    """The same for reductions, norms and softmax. Fitted."""
    strided_share: float = 0.743
    """For kernels that go element by element: what is broadcast, cut out or of several dtypes. Fitted."""
    transposed_share: float = 0.524
    """For copies that transpose. Fitted."""
    joined_share: float = 0.458
    """For `cat` and `stack`. Fitted."""
    rewriting_share: float = 0.86
    """For rewriting images for the tensor cores, before and after a convolution. Fitted."""
    irregular_share: float = 0.233
    """For gathers, scatters and sorts. Fitted."""
    list_share: float = 0.9
    """For kernels over lists of tensors (foreach and fused optimizers). Fitted."""
    cache_gain: float = 2.1
    """How much faster than memory the last-level cache is, for what is still in it. Fitted."""
    kernel_seconds: float = 1.51e-06
    """From a kernel's start to its end if it has nothing to do. Fitted."""

    # Communication ---------------------------------------------------------------------------------------
    taken_share: float = 0.073
    """Of the device, that the kernel of a collective takes from what is computed beside it: it occupies one
    multiprocessor for each channel, up to 24 of them. From the fit of `benchmarks/cluster_published.py`."""
    link_share: float = 0.8
    """Of NVLink or PCIe, that a ring gets: NCCL's own tuner expects 235 of an A100's 300 GB/s."""
    network_share: float = 0.339
    """Of the network between nodes, that a ring gets in a step: with it counts that switches are shared, and
    that some ranks are late. From the fit of `benchmarks/cluster_published.py`; few of its runs wait for
    it."""

    # The host --------------------------------------------------------------------------------------------
    host_factor: float = 1.0
    """How much slower the host is than the figures below, which are of a fast one. Hosts differ between
    machines: where small steps are published, the machine has its own."""
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
    wrapped_op: float = 20e-6
    conversion: float = 80e-6
    unit_op: float = 23e-6
    """Python of DTensor and of FSDP2: an operator on distributed tensors, one of them made or taken apart, an
    op of a unit. `benchmarks/loopback_steps.py` measures them on the host that it runs on."""
    reload: float = 0.0
    """On a CPU: bringing Python's own data and code back after an operator has filled the core's cache."""
    rank_reload: float = 0.0
    """The same for Python of DTensor and of FSDP2, for each of their three."""
    cache_bytes: float = 0.0
    """On a CPU: the size of that cache."""
    launch: float = 5e-6
    """From the host's call to the kernel's start on an idle GPU."""

    # How sure that is ------------------------------------------------------------------------------------
    uncertainty: float = 0.2
    """Relative, on devices and for kinds of operators that steps were fitted on: what four of five steps stay
    within whose model the fit has not seen. This figure and the next three are of the fits that
    `benchmarks/time_accuracy_published.py` judges rows by."""
    related_uncertainty: float = 0.34
    """The same for other devices of an architecture that steps were fitted on, and for other kinds: an H100
    from an H200, and the other way round."""
    uncalibrated_uncertainty: float = 0.35
    """The same for other architectures of NVIDIA's: an L40S, an RTX 3090 and an A100, each from all other
    devices."""
    foreign_uncertainty: float = 1.9
    """The same for devices of other makers, whose kernels are others: an MI325X from NVIDIA's devices."""
    host_uncertainty: float = 1.9
    """The same for the time in which the device waits for the host: ten steps of one sample, by what is
    assumed of hosts here."""
