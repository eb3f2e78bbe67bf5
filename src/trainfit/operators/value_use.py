"""Which operators read the values of their tensors, show them to Python, or make values that are known."""

from __future__ import annotations

from trainfit.operators.names import OperatorSet, aten_name

SHOW_VALUES = OperatorSet.of("_local_scalar_dense equal allclose")
"""Return plain numbers: the host waits for them, and Python may decide by them."""

SIZED_BY_VALUES = OperatorSet.of(
    """
    nonzero _unique _unique2 unique_dim unique_consecutive unique_dim_consecutive masked_select bincount
    repeat_interleave
    """
)
"""How large the result is depends on the values of the inputs, so that the host waits for them."""

ONES = OperatorSet.of("ones ones_like new_ones")
ZEROS = OperatorSet.of("zeros zeros_like new_zeros")
FULL = OperatorSet.of("full full_like new_full")
MADE_LIKE = OperatorSet.of("ones_like new_ones zeros_like new_zeros full_like new_full")
"""Make a constant, and look only at the shape of the tensor that they are given."""
SHAPED_LIKE = MADE_LIKE | OperatorSet.of(
    "empty_like new_empty new_empty_strided rand_like randn_like randint_like"
)

ALL_TRUE = OperatorSet.of("all _is_all_true")
ANY_TRUE = OperatorSet.of("any _is_any_true")

RANDOM = OperatorSet.of(
    """
    rand rand_like randn randn_like randint randint_like randperm random random_ uniform uniform_ normal
    normal_ normal_functional bernoulli bernoulli_ binomial cauchy cauchy_ exponential exponential_ geometric
    geometric_ log_normal log_normal_ multinomial poisson _sample_dirichlet _standard_gamma
    dropout dropout_ native_dropout _fused_dropout feature_dropout feature_dropout_ alpha_dropout
    alpha_dropout_ feature_alpha_dropout feature_alpha_dropout_ _cudnn_init_dropout_state
    _fill_mem_eff_dropout_mask_
    rrelu rrelu_ rrelu_with_noise rrelu_with_noise_ rrelu_with_noise_functional
    lstm gru rnn_tanh rnn_relu _cudnn_rnn miopen_rnn _lstm_mps
    scaled_dot_product_attention _scaled_dot_product_attention_math _scaled_dot_product_attention_math_for_mps
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
    _scaled_dot_product_fused_attention_overrideable _triton_scaled_dot_attention _fused_sdp_choice
    _flash_attention_forward _flash_attention_forward_no_dropout_inplace _efficient_attention_forward
    _cudnn_attention_forward _cudnn_attention_backward _nested_tensor_softmax_with_shape
    """
)
"""Draw from a generator, or may do so: those with a dropout inside."""

DRAW_NOTHING = OperatorSet.of("_scaled_dot_product_flash_attention_for_cpu")
"""Tagged by torch as random, like all attention, but the kernel has no dropout."""


def reads_metadata_only(name: str) -> bool:
    """Whether an operator looks at the shape of its tensors, not at the values.

    `randint_like` with a tensor for its bound reads that one.
    """
    return name in SHAPED_LIKE and ".Tensor" not in name


def place_of_constant(name: str) -> int:
    """Return which argument of an operator of `FULL` is the value that it fills with."""
    return 2 if aten_name(name) == "new_full" else 1
