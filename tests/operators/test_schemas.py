"""What the registry says by name against the schemas, tags and kernels of every operator that torch has."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch._ops import OpOverload

from trainfit.capturing.handlers import HANDLERS
from trainfit.capturing.schemas import SIZED_BY_VALUES_OVERLOADS, describe, in_place_forms
from trainfit.operators import memory_use, value_use
from trainfit.operators.names import aten_name, functional_name, is_operator

aten = torch.ops.aten


def every_overload() -> Iterator[OpOverload]:
    """Yield the operators that a dispatcher can meet, without those that only TorchScript has."""
    for name in sorted({schema.name for schema in torch._C._jit_get_all_schemas()}):
        space, _, alone = name.partition("::")
        packet = getattr(aten, alone, None) if space == "aten" else None
        if packet is not None:
            for overload in packet.overloads():
                func = getattr(packet, overload)
                if torch._C._dispatch_has_kernel(func.name()):
                    yield func


EVERY = tuple(every_overload())
NAMES = {aten_name(str(func)) for func in EVERY}


def tensors(func: OpOverload) -> list[torch.Argument]:
    return [a for a in func._schema.arguments if "Tensor" in str(a.type)]


def names_of(condition: object) -> set[str]:
    assert callable(condition)
    return {aten_name(str(func)) for func in EVERY if condition(func)}


def test_there_are_operators_to_check() -> None:
    assert len(EVERY) > 2500


def test_what_is_random_has_torchs_tag() -> None:
    assert names_of(lambda f: torch.Tag.nondeterministic_seeded in f.tags) == value_use.RANDOM.names
    assert value_use.DRAW_NOTHING.names < value_use.RANDOM.names


def test_what_draws_nothing_leaves_the_generator_alone() -> None:
    query = torch.randn(1, 1, 4, 8)
    before = torch.get_rng_state()
    aten._scaled_dot_product_flash_attention_for_cpu.default(query, query, query)
    assert torch.equal(before, torch.get_rng_state())


def test_undeclared_views_share_memory_and_do_not_say_so() -> None:
    calls = {
        "_unsafe_view": lambda x: aten._unsafe_view.default(x, [16]),
        "unsafe_split": lambda x: aten.unsafe_split.Tensor(x, 2)[0],
        "unsafe_split_with_sizes": lambda x: aten.unsafe_split_with_sizes.default(x, [1, 3])[0],
        "lift": aten.lift.default,
    }
    assert set(calls) == memory_use.UNDECLARED_VIEWS.names
    for name, call in calls.items():
        tensor = torch.zeros(4, 4)
        assert call(tensor).untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr(), name
    views = (func for func in EVERY if str(func) in memory_use.UNDECLARED_VIEWS)
    for func in (func for func in views if not func._schema.is_mutable):
        assert all(value.alias_info is None for value in func._schema.returns), func
        assert describe(func).is_view, func


def test_what_ends_in_an_underscore_writes_to_an_argument() -> None:
    """By torch's convention; `functional_name` and the in-place forms rest on it."""
    named = {name for name in NAMES if name.endswith("_") and not name.startswith("__")}
    writing = names_of(lambda f: f._schema.is_mutable and not f._schema.overload_name.endswith("out"))
    assert named - writing == set()
    declared = {name for name in NAMES if not name.endswith("_")} & names_of(
        lambda f: f._schema.is_mutable and not any(a.is_out for a in f._schema.arguments)
    )
    assert declared == {
        *("_batch_norm_with_update", "_native_batch_norm_legit"),
        "_flash_attention_forward_no_dropout_inplace",
        *("rrelu_with_noise", "_cummax_helper", "_cummin_helper", "retain_grad", "record_stream", "set_data"),
        *("_fused_moving_avg_obs_fq_helper", "fused_moving_avg_obs_fake_quant", "fbgemm_linear_fp16_weight"),
        "fbgemm_linear_fp16_weight_fp32_activation",
    }


def test_in_place_forms_write_to_their_first_argument() -> None:
    found = in_place_forms("mul.Tensor index_put.default")
    assert found == {aten.mul.Tensor: aten.mul_.Tensor, aten.index_put.default: aten.index_put_.default}
    assert functional_name("aten.mul_.Tensor") == "mul"


def test_what_overwrites_its_first_argument_declares_to_write_it() -> None:
    for func in (func for func in EVERY if str(func) in memory_use.OVERWRITE_FIRST):
        first = func._schema.arguments[0].alias_info
        assert first is not None and first.is_write, func
        assert describe(func).overwrites_first


def test_what_only_allocates_makes_no_view() -> None:
    for func in (func for func in EVERY if str(func) in memory_use.ONLY_ALLOCATE):
        assert describe(func).uninitialised and not describe(func).is_view, func


def test_every_way_to_make_a_tensor_without_values_is_known() -> None:
    empty = {name for name in NAMES if name.startswith(("empty", "new_empty", "_empty"))}
    quantised = {"_empty_affine_quantized", "_empty_per_channel_affine_quantized", "empty_quantized"}
    assert empty - quantised == memory_use.ONLY_ALLOCATE.names


def test_everything_that_fills_its_first_argument_with_draws_overwrites_it() -> None:
    """The results do not depend on what was there before: they are the same for zeros and ones."""
    for name in memory_use.OVERWRITE_FIRST.names - {"copy_"}:
        results = []
        for start in (torch.zeros(8), torch.ones(8)):
            torch.manual_seed(0)
            getattr(start, name)(*{"fill_": (3,), "geometric_": (0.5,), "random_": (9,)}.get(name, ()))
            results.append(start)
        assert torch.equal(*results), name
    fills = {n for n in value_use.RANDOM.names if n.endswith("_")} & memory_use.OVERWRITE_FIRST.names
    dependent = {"dropout_", "feature_dropout_", "alpha_dropout_", "feature_alpha_dropout_", "rrelu_"}
    dependent |= {"rrelu_with_noise_", "_fill_mem_eff_dropout_mask_"}
    assert {n for n in value_use.RANDOM.names if n.endswith("_")} - fills == dependent


def test_running_statistics_that_move_without_being_declared() -> None:
    undeclared = names_of(
        lambda f: any(a.name in memory_use.STATISTICS and a.alias_info is None for a in f._schema.arguments)
    )
    moving = {name for name in NAMES if memory_use.moves_statistics(f"aten.{name}.default")}
    assert undeclared - moving == {
        *("native_batch_norm_backward", "cudnn_batch_norm_backward", "miopen_batch_norm_backward"),
        *("batch_norm_backward", "_batch_norm_impl_index_backward"),  # read them
        *("_batch_norm_no_update", "_native_batch_norm_legit_no_training"),  # evaluation
        *("_batch_norm_with_update_functional", "_native_batch_norm_legit_functional"),  # return new ones
        *("batch_norm", "instance_norm", "_batch_norm_impl_index"),  # made of others
    }
    assert moving <= undeclared


def test_native_batch_norm_moves_statistics() -> None:
    mean, variance = torch.zeros(3), torch.ones(3)
    aten.native_batch_norm.default(torch.randn(4, 3), None, None, mean, variance, True, 0.1, 1e-5)
    assert mean.abs().sum() > 0


def test_what_answers_with_plain_values_shows_them_or_asks_for_metadata() -> None:
    """Of what is not made of other operators: those that look at values are `SHOW_VALUES`."""
    plain = {
        aten_name(str(func))
        for func in EVERY
        if tensors(func)
        and func._schema.returns
        and not any("Tensor" in str(value.type) for value in func._schema.returns)
        and not describe(func).composite
    }
    assert value_use.SHOW_VALUES.names <= plain | {"allclose"}
    known = value_use.SHOW_VALUES | memory_use.TOUCH_NO_DATA | memory_use.INVISIBLE
    assert plain - known.names == {
        *("_dimI", "_dimV", "_fused_sdp_choice", "_has_same_storage_numel"),
        *("_nested_get_ragged_idx", "_nested_tensor_from_mask_left_aligned", "_nnz", "_use_cudnn_ctc_loss"),
        *("_use_miopen_ctc_loss", "dense_dim", "is_coalesced", "is_set_to", "q_per_channel_axis", "q_scale"),
        *("q_zero_point", "qscheme", "sparse_dim", "_cslt_sparse_mm_search"),
    }


def test_what_is_sized_by_values_has_torchs_tag() -> None:
    tagged = {aten_name(str(f)) for f in EVERY if torch.Tag.dynamic_output_shape in f.tags}
    sized = value_use.SIZED_BY_VALUES.names
    assert sized <= tagged
    # By a mask or by lengths only; made of others; whatever the values are, of the same size.
    assert tagged - sized == {"index", "_ctc_loss", "argwhere", "one_hot", "linalg_lstsq"}
    assert all(torch.Tag.dynamic_output_shape in f.tags for f in SIZED_BY_VALUES_OVERLOADS)


def test_capture_has_an_answer_to_everything_that_depends_on_values() -> None:
    handled = {aten_name(str(func)) for func in HANDLERS}
    for kind in (value_use.SHOW_VALUES, value_use.SIZED_BY_VALUES, memory_use.TOUCH_NO_DATA):
        assert kind.names <= handled


def test_what_reads_metadata_only_has_one_tensor_and_the_same_result_for_any_values() -> None:
    found = [func for func in EVERY if value_use.reads_metadata_only(str(func))]
    assert len(found) > 12
    for func in found:
        assert len([a for a in tensors(func) if a.alias_info is None]) == 1, func
    assert not value_use.reads_metadata_only("aten.randint_like.Tensor")
    alike = {name for name in NAMES if name.endswith("_like") or name.startswith("new_")}
    assert alike - {name for name in alike if value_use.reads_metadata_only(f"aten.{name}.default")} == set()


def test_names_of_others_are_not_torchs() -> None:
    assert aten_name("aten.add_.Tensor") == "add_"
    assert aten_name("mine.add_.Tensor") == "mine.add_.Tensor"
    assert "mine.empty.default" not in memory_use.ONLY_ALLOCATE
    assert "aten.empty.memory_format" in memory_use.ONLY_ALLOCATE
    assert not is_operator("torch.tensor")
    assert is_operator("mine.add_.Tensor")
