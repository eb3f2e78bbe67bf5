"""Workspaces of a GPU's kernels, as formulas of the operator's signature and the device.

One table says which operator has which formula; what each is, and where it comes from, stands with it. What
is not in the table allocates nothing inside itself, or nothing that counts (scans, searches for nonzero
elements: a few bytes per thousand elements), except for those in `_NOT_KNOWN`.
"""

from __future__ import annotations

from collections.abc import Callable

from trainfit.devices.device_table import ANY_GPU, Device
from trainfit.operators.copied_inputs import copied_bytes
from trainfit.operators.families import FACTORISATIONS, RECURRENT
from trainfit.operators.names import OperatorSet, aten_name
from trainfit.operators.recorded_calls import ITEM_BYTES, RecordedArguments, elements
from trainfit.traces.trace import Signature
from trainfit.workspace import attention_workspaces as attention
from trainfit.workspace import reduction_workspaces as reductions
from trainfit.workspace import sorting_workspaces as sorting
from trainfit.workspace.convolution_workspaces import convolution_backward_workspace, convolution_workspace
from trainfit.workspace.kernel_workspace import KernelWorkspace

_CHUNK = 65536
"""Elements of a tensor that one block of an operator on lists works on."""

_NOT_KNOWN = (
    FACTORISATIONS
    | RECURRENT
    | OperatorSet.of(
        """
        _fft_r2c _fft_c2r _fft_c2c _grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2 _ctc_loss
        _ctc_loss_backward _unique _unique2 unique_dim unique_consecutive unique_dim_consecutive mode kthvalue
        median nanmedian multinomial randperm histc bincount _embedding_bag_dense_backward
        _embedding_bag_backward _cdist_forward _cdist_backward
        """
    )
)
"""Operators that allocate inside themselves, by rules that are not public or not written here."""


def gpu_workspace(
    signature: Signature, device: Device = ANY_GPU, tf32: bool = False
) -> KernelWorkspace | None:
    """Return what a GPU's kernel allocates inside itself; None where that is not known.

    `tf32` is whether convolutions in float32 may be rounded.
    """
    name = aten_name(signature.name)
    if name in _CONVOLUTIONS:
        return _CONVOLUTIONS[name](signature, device, tf32)
    formula = _FORMULAS.get(name)
    found = formula(signature, device) if formula else None if signature.name in _NOT_KNOWN else 0
    if found is None:
        return None
    found += copied_bytes(signature)
    return KernelWorkspace(found, found)


def has_formula(signature: Signature) -> bool:
    """Whether an operator's workspace is computed, rather than nothing."""
    name = aten_name(signature.name)
    return name in _CONVOLUTIONS or name in _FORMULAS


def _reduced_loss(signature: Signature, device: Device) -> int:
    """A loss that is a mean or a sum first writes what it is the mean of."""
    spec = signature.inputs[0]
    if RecordedArguments(signature).get(2, "reduction", 1) == 0:
        return 0
    return elements(spec) * ITEM_BYTES.get(spec.dtype, 1)


def _list_norm(signature: Signature, device: Device) -> int:
    """Norms of many tensors: one float32 (or float64) per tensor for each chunk of the largest."""
    if not signature.inputs:
        return 0
    chunks = max(-(-elements(spec) // _CHUNK) for spec in signature.inputs)
    item = max(max(ITEM_BYTES.get(spec.dtype, 1) for spec in signature.inputs), 4)
    return item * len(signature.inputs) * chunks


_CONVOLUTIONS: dict[str, Callable[[Signature, Device, bool], KernelWorkspace]] = {
    **dict.fromkeys(("convolution", "_convolution", "cudnn_convolution"), convolution_workspace),
    "convolution_backward": convolution_backward_workspace,
}
_FORMULAS: dict[str, Callable[[Signature, Device], int | None]] = {
    "_scaled_dot_product_flash_attention": attention.flash_forward,
    "_scaled_dot_product_flash_attention_backward": attention.flash_backward,
    "_scaled_dot_product_efficient_attention": attention.efficient_forward,
    "_scaled_dot_product_efficient_attention_backward": attention.efficient_backward,
    "embedding_dense_backward": sorting.embedding_backward,
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"), sorting.index_put),
    "sort": sorting.sort,
    "topk": sorting.topk,
    **dict.fromkeys(
        (
            *("sum", "nansum", "mean", "prod", "amax", "amin", "any", "all", "argmax", "argmin", "norm"),
            *("linalg_vector_norm", "var", "std", "var_mean", "std_mean", "max", "min"),
        ),
        reductions.reduction,
    ),
    **dict.fromkeys(
        ("native_layer_norm_backward", "_fused_rms_norm_backward"), reductions.layer_norm_backward
    ),
    "native_group_norm": reductions.group_norm,
    "native_group_norm_backward": reductions.group_norm_backward,
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "batch_norm_stats"),
        reductions.batch_norm,
    ),
    **dict.fromkeys(
        ("native_batch_norm_backward", "batch_norm_backward", "batch_norm_backward_reduce"),
        reductions.batch_norm_backward,
    ),
    **dict.fromkeys(("mse_loss", "smooth_l1_loss", "huber_loss"), _reduced_loss),
    "_foreach_norm": _list_norm,
}
