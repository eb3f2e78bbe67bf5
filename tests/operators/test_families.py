"""The families of operators against every operator that torch has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trainfit.costs.constants import CALIBRATED
from trainfit.costs.roofline import Roofline
from trainfit.devices.device_table import Device
from trainfit.operators import families, fused_attention, matrix_products, memory_use, value_use
from trainfit.operators.families import IRREGULAR, REDUCTIONS, takes_lists
from trainfit.operators.names import OperatorSet
from trainfit.traces.trace import Signature, TensorSpec

NAMES = {
    schema.name.removeprefix("aten::")
    for schema in torch._C._jit_get_all_schemas()
    if schema.name.startswith("aten::")
}
WORDS = {
    "memory": """
        embedding index gather scatter sort topk nonzero unique take masked_select bincount repeat_interleave
        norm softmax sum mean var std amax amin argmax argmin logsumexp cumsum any all pool nll_loss prod
    """,
    "convolutions": "conv rnn lstm gru",
    "products": "mm attention linear",
    "sizes": "nonzero unique masked_select bincount repeat_interleave",
    "factorisations": "matrix_exp linalg cholesky",
}
"""Parts of names by which operators were once classified."""
FAMILIES = {
    "memory": IRREGULAR | REDUCTIONS,
    "convolutions": families.CONVOLUTIONS | families.RECURRENT,
    "products": families.MATRIX_PRODUCTS | families.ATTENTION,
    "sizes": value_use.SIZED_BY_VALUES,
    "factorisations": families.FACTORISATIONS,
}
OUTSIDE = {
    "memory": """
        __derive_index _batch_norm_impl_index _batch_norm_impl_index_backward _gather_sparse_backward
        _grad_sum_to_size _grid_sampler_2d_cpu_fallback _grid_sampler_2d_cpu_fallback_backward
        _has_compatible_shallow_copy_type _nested_sum_backward _nested_tensor_softmax_with_shape
        _no_grad_embedding_renorm_ _no_grad_normal_ _philox_normal _philox_normal_
        _scaled_dot_product_attention_math _scaled_dot_product_attention_math_for_mps
        _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
        _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
        _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
        _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
        _scaled_dot_product_fused_attention_overrideable
        _scaled_dot_product_fused_attention_overrideable_backward _sparse_sum_backward
        _test_functorch_fallback _test_parallel_materialize _weight_norm
        _weight_norm_differentiable_backward adaptive_avg_pool2d adaptive_avg_pool3d
        adaptive_avg_pool3d_backward allclose as_strided_scatter batch_norm batch_norm_backward_elemt
        batch_norm_elemt cartesian_prod cosine_embedding_loss cumprod_backward diagonal_scatter einsum
        embedding_backward embedding_bag frobenius_norm gather_backward group_norm hinge_embedding_loss
        index_select_backward instance_norm is_nonzero layer_norm linalg_householder_product
        linalg_matrix_norm linalg_norm log_normal log_normal_ log_softmax masked_select_backward max_pool1d
        max_pool2d max_pool2d_backward max_pool3d nanmean nll_loss nll_loss2d nll_loss_nd nonzero_numpy
        norm_except_dim normal normal_ normal_functional nuclear_norm poisson_nll_loss quantized_batch_norm
        quantized_max_pool1d quantized_max_pool2d quantized_max_pool3d rindex scaled_dot_product_attention
        select_scatter slice_scatter softmax sorted special_log_softmax special_logsumexp special_softmax
        take_along_dim
    """,
    "convolutions": """
        _convert_indices_from_coo_to_csr _convert_indices_from_csr_to_coo _convert_weight_to_int4pack
        _convert_weight_to_int4pack_for_cpu _convolution_mode _cudnn_rnn_flatten_weight _lstm_mps
        _mps_convolution _mps_convolution_transpose _use_cudnn_rnn_flatten_weight conv1d conv2d conv3d
        conv_transpose1d conv_transpose2d conv_transpose3d lstm_mps_backward mkldnn_reorder_conv2d_weight
        mkldnn_reorder_conv3d_weight mps_convolution_backward mps_convolution_transpose_backward
        quantized_gru quantized_gru_cell quantized_lstm quantized_lstm_cell quantized_rnn_relu_cell
        quantized_rnn_tanh_cell slow_conv3d thnn_conv2d
    """,
    "products": """
        __upsample_bilinear _compute_linear_combination _cslt_sparse_mm_search _cummax_helper _cummin_helper
        _nested_get_jagged_dummy _standard_gamma _standard_gamma_grad _upsample_bilinear2d_aa
        _upsample_bilinear2d_aa_backward _weight_int4pack_mm _weight_int4pack_mm_for_cpu
        _weight_int4pack_mm_with_scales_and_zeros _weight_int8pack_mm _wrapped_linear_prepack
        _wrapped_quantized_linear_prepacked cummax cummaxmin_backward cummin digamma digamma_
        fbgemm_linear_fp16_weight fbgemm_linear_fp16_weight_fp32_activation fbgemm_linear_int8_weight
        fbgemm_linear_int8_weight_fp32_activation fbgemm_linear_quantize_weight fbgemm_pack_gemm_matrix_fp16
        fbgemm_pack_quantized_matrix gamma hamming_window igamma igamma_ igammac igammac_ lgamma lgamma_
        mvlgamma mvlgamma_ polygamma polygamma_ smm special_digamma special_gammainc special_gammaincc
        special_gammaln special_multigammaln special_polygamma upsample_bilinear2d
        upsample_bilinear2d_backward upsample_linear1d upsample_linear1d_backward upsample_trilinear3d
        upsample_trilinear3d_backward
    """,
    "sizes": "count_nonzero is_nonzero masked_select_backward nonzero_numpy nonzero_static",
    "factorisations": """
        _linalg_check_errors linalg__powsum linalg_cholesky linalg_cond linalg_cross linalg_det
        linalg_diagonal linalg_eigh linalg_eigvalsh linalg_inv linalg_ldl_factor linalg_lu_factor
        linalg_matmul linalg_matrix_norm linalg_matrix_power linalg_matrix_rank linalg_multi_dot linalg_norm
        linalg_slogdet linalg_solve linalg_solve_ex linalg_svd linalg_svdvals linalg_tensorinv
        linalg_tensorsolve linalg_vander linalg_vecdot linalg_vector_norm matrix_exp_backward
    """,
}
"""Operators with such a part in their name that belong elsewhere: they only sound alike, only copy, run on
other devices, or are made of other operators, which are what a trace has."""


@pytest.mark.parametrize("family", FAMILIES)
def test_every_operator_that_sounds_like_one_is_inside_or_outside(family: str) -> None:
    alike = {name for name in NAMES if any(word in name for word in WORDS[family].split())}
    alike = {name for name in alike if not takes_lists(f"aten.{name}.default")}
    outside = set(OUTSIDE[family].split())
    assert not outside & FAMILIES[family].names
    assert alike - FAMILIES[family].names == outside


def test_there_are_no_operators_in_a_family_that_torch_does_not_have() -> None:
    for registry in (families, memory_use, value_use):
        sets = {name: found for name, found in vars(registry).items() if isinstance(found, OperatorSet)}
        assert {name: set(found) - NAMES for name, found in sets.items() if set(found) - NAMES} == {}
    assert not IRREGULAR.names & REDUCTIONS.names
    assert set(matrix_products._CONVOLUTIONS) <= families.CONVOLUTIONS.names
    known = families.CONVOLUTIONS | families.RECURRENT | families.MATRIX_PRODUCTS
    assert set(matrix_products._PRODUCTS) <= known.names
    assert set(fused_attention._CAUSAL_POSITION) <= families.ATTENTION.names
    assert families.PLAIN_PRODUCTS.names <= families.MATRIX_PRODUCTS.names


def test_every_operator_that_takes_lists_of_tensors_in_step_is_known() -> None:
    lists = {name for name in NAMES if takes_lists(f"aten.{name}.default")}
    assert {name for name in NAMES if "foreach" in name} == lists - families.FUSED_OPTIMIZERS.names
    fused = {name for name in NAMES if name.startswith("_fused_")} - lists
    assert fused == {
        *("_fused_dropout", "_fused_rms_norm", "_fused_rms_norm_backward", "_fused_sdp_choice"),
        *("_fused_moving_avg_obs_fq_helper", "_fused_moving_avg_obs_fq_helper_functional"),
    }


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("aten.normal_.default", "stream_share"),
        ("aten._scaled_dot_product_flash_attention.default", "stream_share"),
        ("aten.count_nonzero.default", "reduction_share"),
        ("aten.slice_scatter.default", "stream_share"),
        ("aten.max.dim", "reduction_share"),
        ("aten.native_layer_norm.default", "reduction_share"),
        ("aten.index_put_.default", "irregular_share"),
        ("aten._foreach_norm.Scalar", "list_share"),
        ("aten._fused_adagrad_.default", "list_share"),
    ],
)
def test_operators_get_the_bandwidth_of_their_family(name: str, share: str) -> None:
    """A thousand seconds at the whole bandwidth, and four times as long at a quarter of it."""
    device = Device("slow", "cuda", 1 << 30, 1e6, {"fp32": 1e15}, sm_count=1)
    spec = TensorSpec("float32", (64,), (1,))
    signature = Signature(name, (spec,), (spec,), "[[],{}]", False, False, False)
    signature = replace(signature, moved_bytes=10**9, work_source="formula")
    constants = replace(CALIBRATED, kernel_seconds=0.0, memory_share=1.0)
    assert Roofline(device, replace(constants, **{share: 1.0})).price(signature).seconds == 1000.0
    assert Roofline(device, replace(constants, **{share: 0.25})).price(signature).seconds == 4000.0
