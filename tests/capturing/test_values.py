"""Questions about values: real answers where they are known, stated assumptions where they are not."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from captured_steps import Build, captured, inside, op_names, ops, result, show, signature, training
from torch import nn

from trainfit.capturing import values
from trainfit.capturing.random_stream import seeded
from trainfit.capturing.values import _plausible
from trainfit.errors import CaptureError, UserCodeError
from trainfit.steps.step import Step
from trainfit.traces.trace import Trace

pytestmark = pytest.mark.usefixtures("little_garbage")

WIDTH = 300
"""A weight of 300 x 300 has more than the 65,536 elements up to which floats are computed for real."""
ROWS = 8


class Asking(nn.Module):
    """A layer whose result is unknown, and a question about it."""

    def __init__(self, question: Callable[[torch.Tensor], Any], width: int = WIDTH) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.question = question
        self.answers: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        self.answers.append(self.question(hidden))
        return hidden


def asked(question: Callable[[torch.Tensor], Any]) -> tuple[Any, Trace]:
    """Ask a question of unknown values during a capture; return the answer and the trace."""
    models: list[Asking] = []

    def make_model() -> Asking:
        models.append(Asking(question))
        return models[-1]

    trace = captured(training(make_model, ROWS, WIDTH))
    return models[-1].answers[-1], trace


def line_marked(word: str) -> str:
    """Return `file:line` of the line in this file that ends with `# <- word`, as warnings write it."""
    marker = f"# <- {word}"
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = [n for n, line in enumerate(lines, 1) if line.endswith(marker)]
    return f"tests/capturing/{Path(__file__).name}:{number}"


def about_values(trace: Trace) -> list[str]:
    """Return the warnings except the one about workspaces."""
    return [warning for warning in trace.warnings if not warning.startswith("workspaces")]


# What is known is real ------------------------------------------------------------------------------------


def _known_values() -> list[Any]:
    tokens = torch.randint(0, 50, (4, 9))
    mask = tokens > 20
    padded = torch.nn.functional.pad(tokens, (0, 3), value=-1)
    uniques, counts = torch.unique(tokens, return_counts=True)
    return [
        torch.arange(5).sum().item(),
        int(tokens.max()),
        float(torch.tensor(2.5) * 2),
        bool(mask.any()),
        bool((tokens >= 0).all()),
        tokens.tolist(),
        mask.nonzero().tolist(),
        torch.nonzero(mask, as_tuple=True)[1].tolist(),
        tokens[mask].tolist(),
        tokens.masked_select(mask).tolist(),
        uniques.tolist(),
        counts.tolist(),
        torch.bincount(tokens.flatten(), minlength=50).tolist(),
        torch.repeat_interleave(torch.arange(3), torch.tensor([1, 0, 2])).tolist(),
        tokens.numpy().sum().item(),
        numpy.asarray(tokens).tolist(),
        torch.equal(tokens, tokens.clone()),
        torch.allclose(torch.ones(2), torch.ones(2)),
        (padded == -1).sum(dim=1).tolist(),
        torch.rand(3).tolist(),
        torch.randperm(6).tolist(),
        torch.bernoulli(torch.full((5,), 0.5)).tolist(),
        torch.tensor([[1, 2], [3, 4]]).T.flatten().tolist(),
        torch.from_numpy(numpy.arange(4)).cumsum(0).tolist(),
        numpy.random.rand(2).tolist(),
        random.random(),
        torch.multinomial(torch.ones(10), 3).tolist(),
        torch.topk(torch.tensor([3.0, 9.0, 5.0]), 2).indices.tolist(),
        torch.empty(3).normal_().tolist(),
    ]


def test_questions_about_known_values_get_the_answers_of_a_real_run() -> None:
    with seeded():
        wanted = _known_values()
    assert inside(_known_values) == wanted


def test_known_values_give_no_warnings() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            keep = torch.arange(ROWS) % 2 == 0
            if keep.all() or keep.sum().item() != ROWS // 2:
                raise AssertionError("these values are known")
            return self.layer(x)[keep]

    trace = captured(training(Routed, ROWS, WIDTH))
    assert about_values(trace) == []
    (index,) = ops(trace, "index")
    assert signature(trace, index).outputs[0].shape == (ROWS // 2, WIDTH)


def test_boolean_indexing_of_unknown_data_with_a_known_mask_has_the_real_shape() -> None:
    mask = [True, False, True, True, False, False, False, True]
    answer, trace = asked(lambda hidden: hidden[torch.tensor(mask)].shape)
    assert answer == (sum(mask), WIDTH)
    assert about_values(trace) == []


def test_values_stay_known_through_writes_in_place() -> None:
    def question() -> list[int]:
        buffer = torch.zeros(4, dtype=torch.int64)
        buffer[:2] = 7
        buffer[2:].copy_(torch.tensor([1, 2]))
        buffer.add_(1).index_fill_(0, torch.tensor([3]), 5)
        return buffer.tolist()

    assert inside(question) == [8, 8, 2, 5]


def test_values_become_known_again_when_all_of_the_memory_is_overwritten() -> None:
    def question(hidden: torch.Tensor) -> list[float]:
        buffer = torch.empty(3)
        buffer.copy_(hidden[0, :3].detach())
        buffer.fill_(2)
        return buffer.tolist()

    answer, trace = asked(question)
    assert answer == [2, 2, 2]
    assert about_values(trace) == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_values_are_known_when_they_have_been_written_part_by_part(device: str) -> None:
    def question() -> list[int]:
        offsets = torch.empty(2, 3, dtype=torch.int64)
        offsets[:, 0] = 0
        offsets[:, 1:] = torch.tensor([[4, 9], [16, 25]])
        return torch.arange(offsets[0, 1], offsets[1, 2], 7).tolist()

    assert inside(question, device) == [4, 11, 18]


def test_values_stay_unknown_while_a_part_of_them_is() -> None:
    def question(hidden: torch.Tensor) -> float:
        buffer = torch.empty(3)
        buffer[0] = 2
        buffer[1:] = hidden[0, :2].detach()
        buffer[0] = 3
        return buffer[0].item()

    answer, trace = asked(question)
    assert answer == 1  # which is assumed
    assert len(about_values(trace)) == 1


def test_numpy_memory_shared_with_a_tensor_stays_shared() -> None:
    def question() -> list[float]:
        array = numpy.zeros(3)
        torch.from_numpy(array).add_(2)
        return array.tolist()

    assert inside(question) == [2, 2, 2]


# What is drawn is what a real run draws -------------------------------------------------------------------


class LayerDrop(nn.Module):
    """Skips layers by chance, in three ways."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.dropout = nn.Dropout(0.1)
        self.decisions: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            draws = (torch.rand(()), numpy.random.rand(), random.random(), torch.rand([]).item())
            for draw in draws:
                self.decisions.append(bool(draw < 0.5))
                if draw < 0.5:
                    x = self.dropout(layer(x))
        return x + self.layers[0].bias


def test_layers_are_dropped_as_in_a_real_run() -> None:
    def build(models: list[LayerDrop]) -> Step:
        models.append(LayerDrop())
        return Step.of(models[-1], torch.randn(ROWS, WIDTH), loss=torch.sum)

    real: list[LayerDrop] = []
    with seeded():
        step = build(real)
        for _ in range(13):
            step.run()
    seen: list[LayerDrop] = []
    trace = captured(lambda: build(seen))
    wanted = real[0].decisions
    assert True in wanted
    assert False in wanted
    # The runs of the capture are those of a real loop, and the one that keeps most layers is recorded.
    assert seen[-1].decisions == wanted
    layers = len(wanted) // 13
    kept = [sum(wanted[run * layers : (run + 1) * layers]) for run in range(13)]
    assert len(ops(trace, "addmm", phase="forward")) == kept[trace.steps.recorded - 1] == max(kept[1:])
    assert about_values(trace) == []


# What is unknown is assumed, and said ---------------------------------------------------------------------


def _item(hidden: torch.Tensor) -> Any:
    return hidden.mean().item()  # <- item


def _float(hidden: torch.Tensor) -> Any:
    return float(hidden.sum().detach())  # <- float


def _bool(hidden: torch.Tensor) -> Any:
    return bool(hidden.mean() > 0)  # <- bool


def _tolist(hidden: torch.Tensor) -> Any:
    return hidden[0, :3].tolist()  # <- tolist


def _numpy(hidden: torch.Tensor) -> Any:
    return hidden[:2, :2].detach().numpy().tolist()  # <- numpy


def _asarray(hidden: torch.Tensor) -> Any:
    return numpy.asarray(hidden[0, :2].detach()).tolist()  # <- asarray


def _nonzero(hidden: torch.Tensor) -> Any:
    return hidden.nonzero().shape  # <- nonzero


def _boolean_index(hidden: torch.Tensor) -> Any:
    return hidden[hidden > 0].shape  # <- boolean index


def _masked_select(hidden: torch.Tensor) -> Any:
    return hidden.masked_select(hidden > 0).shape  # <- masked select


def _equal(hidden: torch.Tensor) -> Any:
    return torch.equal(hidden, hidden + 1)  # <- equal


def _allclose(hidden: torch.Tensor) -> Any:
    return torch.allclose(hidden, hidden + 1)  # <- allclose


def _is_nan(hidden: torch.Tensor) -> Any:
    return bool(torch.isnan(hidden.sum()))  # <- isnan


def _any_nan(hidden: torch.Tensor) -> Any:
    return bool(torch.isnan(hidden).any())  # <- any nan


def _all_finite(hidden: torch.Tensor) -> Any:
    return bool(torch.isfinite(hidden).all())  # <- all finite


def _differs_from_itself(hidden: torch.Tensor) -> Any:
    return bool((hidden != hidden).any())  # <- differs from itself


def _all_positive(hidden: torch.Tensor) -> Any:
    return bool((hidden >= 0).all())  # <- all positive


def _any_large(hidden: torch.Tensor) -> Any:
    return bool((hidden.abs() > 1e4).any())  # <- any large


def _argmax(hidden: torch.Tensor) -> Any:
    return hidden.argmax(-1).tolist()  # <- argmax


_HALF = ROWS * WIDTH // 2


@pytest.mark.parametrize(
    ("question", "answer", "mark"),
    [
        (_item, 1.0, "item"),
        (_float, 1.0, "float"),
        (_bool, False, "bool"),
        (_tolist, [0, 0, 0], "tolist"),
        (_numpy, [[0, 0], [0, 0]], "numpy"),
        (_asarray, [0, 0], "asarray"),
        (_nonzero, (ROWS * WIDTH, 2), "nonzero"),
        (_boolean_index, (_HALF,), "boolean index"),
        (_masked_select, (_HALF,), "masked select"),
        (_equal, False, "equal"),
        (_allclose, True, "allclose"),
        (_is_nan, False, "isnan"),
        (_any_nan, False, "any nan"),
        (_all_finite, True, "all finite"),
        (_differs_from_itself, False, "differs from itself"),
        (_all_positive, True, "all positive"),
        (_any_large, False, "any large"),
        (_argmax, list(range(ROWS)), "argmax"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_unknown_value_is_assumed_with_a_warning_that_names_module_and_line(
    question: Callable[[torch.Tensor], Any], answer: Any, mark: str
) -> None:
    found, trace = asked(question)
    assert found == answer
    (warning,) = about_values(trace)
    assert "assumed" in warning
    assert warning.endswith(f" in Asking ({line_marked(mark)})")


def test_a_warning_names_the_value_and_the_operator_that_made_it() -> None:
    _, trace = asked(_item)
    expected = "a value that depends on data (aten.mean.default) was assumed to be 1.0 in Asking"
    assert about_values(trace)[0].startswith(expected)


def test_a_question_outside_of_modules_is_warned_about_without_a_module() -> None:
    def build() -> Step:
        model, inputs = nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH)

        def run() -> float:
            loss = model(inputs).sum()
            loss.backward()
            model.zero_grad()
            return loss.item()  # <- outside

        return Step(model, None, run)

    (warning,) = about_values(captured(build))
    assert warning.endswith(f"was assumed to be 1.0 ({line_marked('outside')})")


def test_a_value_computed_from_an_assumed_one_warns_as_well() -> None:
    def question(hidden: torch.Tensor) -> int:
        chosen = hidden.argmax(-1)
        counts = torch.bincount(chosen * 2, minlength=2 * WIDTH)  # <- counts of assumed
        return int(counts.max())

    answer, trace = asked(question)
    assert answer == 1
    assert any(line_marked("counts of assumed") in warning for warning in about_values(trace))


def test_a_skipped_step_on_nan_is_not_skipped() -> None:
    def build() -> Step:
        model, inputs = nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def run() -> torch.Tensor | None:
            loss = model(inputs).sum()
            if torch.isnan(loss):
                return None
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if not torch.isfinite(norm):
                return None
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return Step(model, optimizer, run)

    trace = captured(build)
    # The weight and the bias are updated.
    assert op_names(trace)[-2:] == ["add_", "add_"], show(trace)


# Loops ----------------------------------------------------------------------------------------------------


def _while_large(hidden: torch.Tensor) -> int:
    error, rounds = hidden.norm(), 0
    while error > 1e-3:
        error, rounds = error / 2, rounds + 1
        assert rounds < 1000, "this loop does not end"
    return rounds


def _while_not_small(hidden: torch.Tensor) -> int:
    error, rounds = hidden.norm(), 0
    while not error < 1e-3:
        error, rounds = error / 2, rounds + 1
        assert rounds < 1000, "this loop does not end"
    return rounds


def _until_break(hidden: torch.Tensor) -> int:
    error, rounds = hidden.norm(), 0
    while True:
        error, rounds = error / 2, rounds + 1
        if error.item() < 1e-3:
            break
        assert rounds < 1000, "this loop does not end"
    return rounds


def _while_any(hidden: torch.Tensor) -> int:
    rounds = 0
    while (hidden.abs() > 1).any():
        hidden, rounds = hidden / 2, rounds + 1
        assert rounds < 1000, "this loop does not end"
    return rounds


@pytest.mark.parametrize("question", [_while_large, _while_not_small, _until_break, _while_any])
def test_a_loop_until_convergence_ends(question: Callable[[torch.Tensor], int]) -> None:
    rounds, trace = asked(question)
    assert rounds < 1000
    assert about_values(trace)


# Routing --------------------------------------------------------------------------------------------------


class Routing(nn.Module):
    """A mixture of four experts, two per token, with a loop over the tokens of each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.counts: list[list[int]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.experts[0](x)
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        self.counts.append(torch.bincount(chosen.flatten(), minlength=4).tolist())
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, slots = torch.where(chosen == number)
            result = result.index_add(0, rows, expert(x[rows]) * weights[rows, slots, None])
        return result


def test_routing_by_topk_is_balanced_and_consistent() -> None:
    models: list[Routing] = []

    def make_model() -> Routing:
        models.append(Routing())
        return models[-1]

    trace = captured(training(make_model, ROWS, WIDTH))
    # Eight tokens with two experts each, over four experts.
    assert models[-1].counts[-1] == [4, 4, 4, 4]
    products = [signature(trace, op).outputs[0].shape for op in ops(trace, "addmm", phase="forward")]
    assert products == [(ROWS, WIDTH), (ROWS, 4), *[(4, WIDTH)] * 4]
    (warning, *_) = [w for w in about_values(trace) if "aten.topk.default" in w]
    assert "were assumed to be spread evenly over 4 in Routing" in warning


@pytest.mark.parametrize("dimension", [0, 1, 2])
def test_the_choices_of_topk_are_distinct_in_every_dimension(dimension: int) -> None:
    def question(hidden: torch.Tensor) -> list[set[int]]:
        chosen = hidden[:, :24].view(ROWS, 4, 6).topk(3, dim=dimension).indices
        return [set(picks) for picks in chosen.movedim(dimension, -1).reshape(-1, 3).tolist()]

    choices = (ROWS, 4, 6)[dimension]
    answer, _ = asked(question)
    assert all(len(picks) == 3 and max(picks) < choices for picks in answer)


def test_sorting_unknown_values_gives_a_permutation() -> None:
    answer, _ = asked(lambda hidden: hidden[0, :7].sort().indices.tolist())
    assert sorted(answer) == list(range(7))


# Gradient scaling -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_gradient_scaler_steps(device: str) -> None:
    scales: list[float] = []

    def build() -> Step:
        model, inputs = nn.Linear(WIDTH, WIDTH, device=device), torch.randn(ROWS, WIDTH, device=device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(device)

        def run() -> None:
            with torch.autocast(device, torch.float16):
                loss = model(inputs).sum()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())

        return Step(model, optimizer, run)

    trace = captured(build, device)
    # Nothing was infinite: the optimizer ran, its state is there, and the scale stayed as it was.
    assert set(scales) == {2.0**16}
    assert any("_amp_foreach_non_finite_check_and_unscale_" in name for name in op_names(trace))
    assert [storage for storage in trace.storages if storage.category == "optimizer_state"]
    assert any("addcdiv" in name for name in op_names(trace, ops(trace, phase="optimizer")))


# What has no answer ---------------------------------------------------------------------------------------


def _unknown_repeats(hidden: torch.Tensor) -> Any:
    repeats = hidden[:, 0].to(torch.int64)
    return hidden.repeat_interleave(repeats, dim=0)  # <- repeats


def _unknown_lengths(hidden: torch.Tensor) -> Any:
    lengths = hidden[:, 0].to(torch.int64)
    targets = torch.zeros(ROWS, 3, dtype=torch.int64)
    steps = torch.full((ROWS,), WIDTH)
    scores = hidden.view(ROWS, WIDTH, 1).expand(-1, -1, 5).transpose(0, 1).log_softmax(-1)
    return torch.nn.functional.ctc_loss(scores, targets, steps, lengths)  # <- lengths


@pytest.mark.parametrize(
    ("question", "mark"),
    [(_unknown_repeats, "repeats"), (_unknown_lengths, "lengths")],
    ids=["repeats", "lengths"],
)
def test_a_shape_that_only_a_real_run_knows_is_refused_with_the_line(
    question: Callable[[torch.Tensor], Any], mark: str
) -> None:
    with pytest.raises(CaptureError) as refused:
        asked(question)
    assert line_marked(mark) in str(refused.value)
    assert "capture cannot follow it" in str(refused.value)


def test_unique_of_unknown_values_is_answered_or_refused_with_the_line() -> None:
    def question(hidden: torch.Tensor) -> Any:
        return hidden.unique()  # <- unique

    try:
        _, trace = asked(question)
    except CaptureError as refused:
        assert line_marked("unique") in str(refused)
    else:
        assert line_marked("unique") in about_values(trace)[0]


# Sizes ----------------------------------------------------------------------------------------------------


def _with_constant(make: Callable[[], torch.Tensor]) -> Build:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return make().float().mean() * self.scale * x

    return training(Constant, 1)


@pytest.mark.parametrize(
    "make",
    [lambda: torch.tensor([1.0, 2.0, 3.0]), lambda: torch.arange(3.0), lambda: torch.zeros(3)],
    ids=["tensor", "arange", "zeros"],
)
def test_known_tensors_count_like_any_other(make: Callable[[], torch.Tensor]) -> None:
    trace = captured(_with_constant(make))
    assert result(trace, 0).bytes == 12
    assert result(trace, 0).category == "activation"


# What is asked while the step is built --------------------------------------------------------------------


def building(prepare: Callable[[nn.Linear], Any]) -> Trace:
    """Capture a step of a layer whose weights are unknown, prepared in some way when it is built."""

    def make_model() -> nn.Module:
        layer = nn.Linear(WIDTH, WIDTH)
        prepare(layer)
        return layer

    return captured(training(make_model, ROWS, WIDTH))


def test_numbers_that_initial_weights_draw_again_are_no_warning() -> None:
    trace = building(lambda layer: nn.init.trunc_normal_(layer.weight, std=0.02, a=-0.04, b=0.04))
    assert about_values(trace) == []
    assert not trace.depends_on_data


def test_what_the_built_model_depends_on_is_a_warning_but_does_not_change_from_step_to_step() -> None:
    def prune(layer: nn.Linear) -> None:
        layer.kept = layer.weight[layer.weight > 0].numel()  # <- prune

    trace = building(prune)
    (warning,) = about_values(trace)
    assert warning.startswith("when the step was built, ")
    assert line_marked("prune") in warning
    assert not trace.depends_on_data


def test_only_tests_that_hold_in_a_healthy_step_are_assumed_to_be_true() -> None:
    for producer in (
        "aten.all.default",
        "aten.all.dim",
        "aten._is_all_true.default",
        "aten.isfinite.default",
    ):
        assert _plausible(torch.bool, producer) is True
    for producer in ("aten.any.default", "mine.small.default", "mine.call.all", "aten.lt.Scalar"):
        assert _plausible(torch.bool, producer) is False


def test_a_large_mask_in_floats_is_known_like_the_integers_that_it_is_made_of() -> None:
    # GIVEN a mask with more elements than floats are otherwise computed for, as transformers makes it
    def question() -> tuple[bool, int]:
        padding = torch.arange(512) < 500
        mask = padding[None, None, :].expand(1, 512, 512) & padding[None, :, None]
        added = torch.where(mask, 0.0, torch.tensor(torch.finfo(torch.float32).min))
        assert added.numel() == 1 << 18
        return bool((added[:, 0] > 0).any()), int((added[0, 0] < 0).sum())

    assert inside(question) == (False, 12)


def test_an_error_that_may_come_from_an_assumption_says_so() -> None:
    """Every row passes a test that is always true; assumed is that every second one does."""

    class Always(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.layer(x)
            rows = (hidden[:, 0] > -1e9).nonzero()[:, 0]  # <- always
            return hidden + hidden.index_select(0, rows)

    with pytest.raises(UserCodeError) as caught:
        captured(training(Always, ROWS, WIDTH))
    assert "This may come from what was assumed, and not happen in a real run" in str(caught.value)
    assert line_marked("always") in str(caught.value)


def test_an_environment_that_is_reached_by_a_link(tmp_path: Path) -> None:
    # Code names its file by the path that it was imported by, which may go through a link.
    packages, ours = Path(torch.__file__).parents[1], Path(values.__file__).parents[2]
    (tmp_path / "linked").symlink_to(packages)
    (tmp_path / "ours").symlink_to(ours)
    program = (
        "import sys\n"
        f"sys.path[:0] = [{str(tmp_path / 'linked')!r}, {str(tmp_path / 'ours')!r}]\n"
        "import torch\n"
        "from trainfit.capturing import values\n"
        "adam, own = torch.optim.Adam.__init__.__code__.co_filename, values.__file__\n"
        "assert '/linked/' in adam and '/ours/' in own, (adam, own)\n"
        "assert not values.is_user_file(adam) and not values.is_user_file(own)\n"
        "assert adam.startswith(values._TORCH_FOLDER) and own.startswith(values._OUR_FOLDER)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
