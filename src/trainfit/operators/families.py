"""Which family an operator belongs to, by its exact name.

One table for all who ask. Parts of names would not do: `norm` is in `normal_`, `nonzero` in `count_nonzero`,
`prod` in `_scaled_dot_product_flash_attention`, `mm` in `cummax`. A test holds the table against every
operator that torch has.
"""

from __future__ import annotations

from trainfit.operators.names import OperatorSet, aten_name

IRREGULAR = OperatorSet.of(
    """
    embedding embedding_dense_backward embedding_sparse_backward embedding_renorm embedding_renorm_
    _embedding_bag _embedding_bag_forward_only _embedding_bag_backward _embedding_bag_dense_backward
    _embedding_bag_sparse_backward _embedding_bag_per_sample_weights_backward
    index _unsafe_index _unsafe_masked_index index_put index_put_ _index_put_impl _index_put_impl_
    _unsafe_index_put _unsafe_masked_index_put_accumulate index_select index_add index_add_ index_copy
    index_copy_ index_fill index_fill_ index_reduce index_reduce_ gather take put put_
    scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_ masked_scatter masked_scatter_
    masked_scatter_backward masked_select max_unpool2d max_unpool3d repeat_interleave
    sort argsort msort topk kthvalue median nanmedian mode searchsorted bucketize
    nonzero nonzero_static _unique _unique2 unique_dim unique_consecutive unique_dim_consecutive bincount
    """
)
"""Gathers, scatters, sorts and searches: memory is not walked straight through."""

REDUCTIONS = OperatorSet.of(
    """
    sum nansum _sparse_sum _sparse_csr_sum sum_to_size mean var var_mean std std_mean prod _sparse_csr_prod
    max min amax amin aminmax _aminmax argmax argmin any all _is_any_true _is_all_true count_nonzero
    logsumexp norm native_norm linalg_vector_norm linalg__powsum renorm renorm_
    cumsum cumsum_ cumprod cumprod_ cummax cummin _cummax_helper _cummin_helper logcumsumexp _logcumsumexp
    _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data _safe_softmax _masked_softmax
    _masked_softmax_backward _sparse_softmax _sparse_softmax_backward_data _sparse_log_softmax
    _sparse_log_softmax_backward_data
    native_layer_norm native_layer_norm_backward rms_norm _fused_rms_norm _fused_rms_norm_backward
    native_group_norm native_group_norm_backward _weight_norm_interface _weight_norm_interface_backward
    native_batch_norm native_batch_norm_backward _native_batch_norm_legit _native_batch_norm_legit_functional
    _native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_with_update_functional
    _batch_norm_no_update batch_norm_backward cudnn_batch_norm cudnn_batch_norm_backward miopen_batch_norm
    miopen_batch_norm_backward batch_norm_stats batch_norm_backward_reduce batch_norm_gather_stats
    batch_norm_gather_stats_with_counts batch_norm_update_stats
    nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward
    avg_pool1d avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward adaptive_avg_pool1d
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool2d_backward adaptive_max_pool3d
    adaptive_max_pool3d_backward fractional_max_pool2d fractional_max_pool2d_backward fractional_max_pool3d
    fractional_max_pool3d_backward max_pool1d_with_indices max_pool2d_with_indices
    max_pool2d_with_indices_backward max_pool3d_with_indices max_pool3d_with_indices_backward
    mkldnn_max_pool2d mkldnn_max_pool2d_backward mkldnn_max_pool3d mkldnn_max_pool3d_backward
    mkldnn_adaptive_avg_pool2d mkldnn_adaptive_avg_pool2d_backward
    """
)
"""Kernels in which many elements become few, or in which every element waits for a sum: norms, softmax,
pooling, scans."""

FUSED_OPTIMIZERS = OperatorSet.of(
    """
    _fused_adam _fused_adam_ _fused_adamw _fused_adamw_ _fused_sgd _fused_sgd_ _fused_adagrad _fused_adagrad_
    """
)

CONVOLUTIONS = OperatorSet.of(
    """
    convolution convolution_overrideable convolution_backward convolution_backward_overrideable _convolution
    _convolution_double_backward cudnn_convolution cudnn_convolution_relu cudnn_convolution_add_relu
    cudnn_convolution_transpose miopen_convolution miopen_convolution_relu miopen_convolution_add_relu
    miopen_convolution_transpose miopen_depthwise_convolution mkldnn_convolution _nnpack_spatial_convolution
    _conv_depthwise2d conv_depthwise3d _slow_conv2d_forward _slow_conv2d_backward slow_conv3d_forward
    slow_conv_dilated2d slow_conv_dilated3d slow_conv_transpose2d slow_conv_transpose3d conv_tbc
    conv_tbc_backward
    """
)

RECURRENT = OperatorSet.of(
    """
    lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    mkldnn_rnn_layer mkldnn_rnn_layer_backward _cudnn_rnn _cudnn_rnn_backward miopen_rnn miopen_rnn_backward
    _thnn_fused_lstm_cell _thnn_fused_lstm_cell_backward _thnn_fused_lstm_cell_backward_impl
    _thnn_differentiable_lstm_cell_backward _thnn_fused_gru_cell _thnn_fused_gru_cell_backward
    _thnn_differentiable_gru_cell_backward
    """
)

MATRIX_PRODUCTS = OperatorSet.of(
    """
    mm bmm matmul addmm addmm_ baddbmm baddbmm_ addbmm addbmm_ mv dot vdot addmv addmv_ addr linear bilinear
    linear_backward mkldnn_linear mkldnn_linear_backward mkldnn_linear_backward_input
    mkldnn_linear_backward_weights _trilinear _addmm_activation _int_mm _scaled_mm _scaled_mm_v2 _grouped_mm
    _scaled_grouped_mm _scaled_grouped_mm_v2 _foreach_mm _mixed_dtypes_linear _sparse_mm _sparse_addmm
    _sparse_mm_reduce_impl _sparse_mm_reduce_impl_backward sparse_sampled_addmm hspmm sspaddmm _cslt_sparse_mm
    _sparse_semi_structured_mm _sparse_semi_structured_addmm _sparse_semi_structured_linear
    """
)

PLAIN_PRODUCTS = OperatorSet.of("mm addmm bmm baddbmm")
"""Dense products of two matrices; libraries need no workspace for them that counts."""

ATTENTION = OperatorSet.of(
    """
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
    _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
    _scaled_dot_product_fused_attention_overrideable
    _scaled_dot_product_fused_attention_overrideable_backward
    _scaled_dot_product_attention_math _scaled_dot_product_attention_math_for_mps
    _flash_attention_forward _flash_attention_forward_no_dropout_inplace _flash_attention_backward
    _efficient_attention_forward _efficient_attention_backward _cudnn_attention_forward
    _cudnn_attention_backward _native_multi_head_attention _triton_multi_head_attention
    _triton_scaled_dot_attention scaled_dot_product_attention
    """
)

FACTORISATIONS = OperatorSet.of(
    """
    cholesky cholesky_inverse cholesky_solve _cholesky_solve_helper matrix_exp linalg_matrix_exp
    linalg_cholesky_ex linalg_eig linalg_eigvals _linalg_eigvals _linalg_eigh _linalg_svd _linalg_det
    _linalg_slogdet _linalg_solve_ex linalg_householder_product linalg_inv_ex linalg_ldl_factor_ex
    linalg_ldl_solve linalg_lstsq linalg_lu linalg_lu_factor_ex linalg_lu_solve linalg_pinv linalg_qr
    linalg_solve_triangular
    """
)
"""Linear algebra that looks at the values: not every matrix has an inverse or a root."""


def list_kind(name: str) -> str | None:
    """Return how an optimizer's operator takes lists of tensors: `foreach` or `fused`; None if not at all."""
    if aten_name(name).startswith("_foreach_"):
        return "foreach"
    return "fused" if name in FUSED_OPTIMIZERS else None


def takes_lists(name: str) -> bool:
    """Whether an operator goes over lists of tensors in one call."""
    return list_kind(name) is not None or aten_name(name).startswith("_amp_foreach_")
