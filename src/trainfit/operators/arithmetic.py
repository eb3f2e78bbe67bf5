"""FLOPs of operators without matrix products: so many per element. They matter little beside the traffic.

The table also says which operators are known at all: what is not in it is priced by its traffic alone and
listed in the result.
"""

from __future__ import annotations

from trainfit.operators.families import takes_lists
from trainfit.operators.names import aten_name
from trainfit.operators.recorded_calls import elements
from trainfit.traces import arguments
from trainfit.traces.trace import Signature

# FLOPs per element of the largest tensor. An exponential or a division counts as one, as in the literature.
_MOVES = """
    empty empty_like empty_strided empty_permuted new_empty new_empty_strided zeros zeros_like new_zeros ones
    ones_like new_ones full full_like new_full arange linspace eye scalar_tensor zero_ fill_ fill copy_ copy
    clone _to_copy contiguous cat stack repeat roll flip tril triu tril_indices triu_indices constant_pad_nd
    reflection_pad1d reflection_pad2d replication_pad2d index_select gather index embedding take unfold_copy
    masked_fill masked_fill_ masked_select where select_backward slice_backward diagonal_backward
    embedding_renorm_ _foreach_zero_ _foreach_copy_ lift_fresh_copy slice_scatter select_scatter
    index_fill index_fill_ index_copy index_copy_ scatter scatter_ nonzero one_hot _local_scalar_dense
    resize_ set_ unfold_backward im2col col2im pixel_shuffle pixel_unshuffle channel_shuffle
    repeat_interleave reflection_pad1d_backward reflection_pad2d_backward replication_pad2d_backward
    as_strided_scatter _copy_from nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward
    _pack_padded_sequence _pad_packed_sequence split_with_sizes_copy split_copy _chunk_cat
"""
_SIMPLE = """
    add add_ sub sub_ rsub mul mul_ div div_ neg neg_ abs abs_ sign sgn maximum minimum clamp clamp_ clamp_min
    clamp_min_ clamp_max clamp_max_ relu relu_ threshold threshold_ threshold_backward eq ne lt le gt ge eq_
    ne_ lt_ le_ gt_ ge_ logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not
    bitwise_xor bitwise_and_ bitwise_or_ bitwise_left_shift bitwise_right_shift __and__ __or__ isnan isinf
    isfinite floor ceil round trunc frac square reciprocal reciprocal_ remainder floor_divide fmod signbit
    sum mean amax amin max min prod argmax argmin any all sum_to_size count_nonzero aminmax
    hardtanh hardtanh_ hardtanh_backward leaky_relu leaky_relu_ leaky_relu_backward
    bernoulli bernoulli_ rand rand_like randn randn_like uniform_ normal_ randint randint_like random_
    randperm exponential_ normal native_dropout native_dropout_backward _fused_dropout
    index_add index_add_ scatter_add scatter_add_ index_put index_put_ _index_put_impl_
    embedding_dense_backward scatter_reduce scatter_reduce_ bincount
    avg_pool1d avg_pool2d avg_pool3d avg_pool2d_backward avg_pool3d_backward _adaptive_avg_pool2d
    _adaptive_avg_pool2d_backward _adaptive_avg_pool3d max_pool2d_with_indices adaptive_max_pool2d
    max_pool2d_with_indices_backward max_pool3d_with_indices _adaptive_avg_pool3d_backward
    adaptive_max_pool2d_backward max_pool3d_with_indices_backward
    cumsum cumprod cummax cummin logcumsumexp searchsorted bucketize
    _foreach_add _foreach_add_ _foreach_sub _foreach_sub_ _foreach_mul _foreach_mul_ _foreach_div
    _foreach_div_ _foreach_neg _foreach_neg_ _foreach_maximum _foreach_maximum_ _foreach_clamp_min_
    _foreach_clamp_max_ _foreach_sign _foreach_abs _foreach_max
    _amp_foreach_non_finite_check_and_unscale_ _amp_update_scale_ complex view_as_complex_copy
    upsample_nearest2d upsample_nearest2d_backward upsample_nearest1d upsample_nearest1d_backward
    _upsample_nearest_exact2d polar angle real imag
"""
_SEVERAL = """
    exp exp_ log log_ log2 log10 log1p expm1 sqrt sqrt_ rsqrt rsqrt_ sin cos tan tanh tanh_ atan2 pow pow_
    sigmoid sigmoid_ erf erfc erfinv erfinv_ xlogy lerp lerp_ addcmul addcmul_ addcdiv addcdiv_ exp2 asin acos
    atan sinh cosh logaddexp log_sigmoid_forward log_sigmoid_backward softplus softplus_backward
    tanh_backward sigmoid_backward silu silu_ silu_backward gelu gelu_ gelu_backward elu elu_ elu_backward
    mish mish_ mish_backward hardswish hardswish_ hardswish_backward hardsigmoid hardsigmoid_
    hardsigmoid_backward glu glu_backward prelu _prelu_kernel _prelu_kernel_backward celu selu
    mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward
    binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits
    var std var_mean std_mean norm linalg_vector_norm logsumexp cdist dist _cdist_forward _cdist_backward
    _foreach_sqrt _foreach_sqrt_ _foreach_pow _foreach_pow_ _foreach_exp _foreach_reciprocal_ _foreach_rsqrt_
    _foreach_lerp_ _foreach_addcmul _foreach_addcmul_ _foreach_addcdiv _foreach_addcdiv_ _foreach_norm
    _foreach_powsum upsample_bilinear2d upsample_bilinear2d_backward upsample_bicubic2d
    upsample_bicubic2d_backward upsample_linear1d upsample_linear1d_backward _upsample_bilinear2d_aa
    _upsample_bicubic2d_aa _upsample_bicubic2d_aa_backward _upsample_bilinear2d_aa_backward
    grid_sampler_2d grid_sampler_2d_backward
"""
_NORMS = """
    _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data _safe_softmax
    native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward rms_norm
    native_batch_norm native_batch_norm_backward _native_batch_norm_legit cudnn_batch_norm
    _native_batch_norm_legit_no_training
    cudnn_batch_norm_backward _batch_norm_with_update batch_norm_backward native_group_norm
    native_group_norm_backward _batch_norm_with_update_functional _masked_softmax _masked_softmax_backward
    _fused_sgd_ _thnn_fused_lstm_cell _thnn_fused_gru_cell _thnn_fused_lstm_cell_backward_impl
    _thnn_fused_gru_cell_backward _weight_norm_interface _weight_norm_interface_backward
    _embedding_bag _embedding_bag_dense_backward _embedding_bag_forward_only _fused_adagrad_
"""
_OPTIMIZERS = "_fused_adam_ _fused_adamw_"
_SORTS = "sort topk argsort msort kthvalue median _unique2 unique_dim unique_consecutive mode nanmedian"
_FFTS = "_fft_r2c _fft_c2r _fft_c2c"

_PER_ELEMENT: dict[str, int] = {}
for _names, _flops in (
    *((_MOVES, 0), (_SIMPLE, 1), (_SEVERAL, 4), (_NORMS, 8), (_OPTIMIZERS, 16)),
    # Comparisons of a radix sort and butterflies of an FFT grow with the logarithm; 20 is a million elements.
    *((_SORTS, 20), (_FFTS, 50)),
):
    _PER_ELEMENT.update(dict.fromkeys(_names.split(), _flops))


def arithmetic_flops(signature: Signature) -> int | None:
    """Return the FLOPs of an operator that works element by element; None if it is not known."""
    if signature.view:
        return 0
    per_element = _PER_ELEMENT.get(aten_name(signature.name))
    if per_element is None:
        return None
    return per_element * _elements(signature)


def _elements(signature: Signature) -> int:
    """Return the elements worked on: those of the largest tensor, or of the first list of tensors."""
    sizes = [elements(spec) for spec in (*signature.inputs, *signature.outputs)]
    if takes_lists(signature.name):
        return sum(sizes) // max(_lists(signature), 1)
    return max(sizes, default=0)


def _lists(signature: Signature) -> int:
    """Return how many lists of tensors of equal length a foreach operator was given and returned."""
    positional, _ = arguments.decode(signature.arguments)
    lengths = [len(value) for value in positional if isinstance(value, list) and value]
    tensors = len(signature.inputs) + len(signature.outputs)
    return round(tensors / lengths[0]) if lengths else 1
