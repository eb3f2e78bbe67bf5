"""`scale`: on how many GPUs, with which mesh."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field

from trainfit.allocator.allocator_options import AllocatorOptions
from trainfit.allocator.named_options import named_options
from trainfit.api.request import Build
from trainfit.api.stopwatch import Stopwatch
from trainfit.basics.doing import Measuring, Progress, as_part_of, heard_by
from trainfit.devices.cluster_text import parse_network
from trainfit.devices.device_table import Device, find_device
from trainfit.errors import DeviceError, OptionError, TrainfitError
from trainfit.models.recipe import StepOptions
from trainfit.planning.requests import bytes_of_budget
from trainfit.scaling.captures_ahead import CapturesAhead
from trainfit.scaling.found_scale import Scale
from trainfit.scaling.mesh_candidates import MeshSizes, powers_of_two
from trainfit.scaling.mesh_judge import MeshJudge
from trainfit.scaling.mesh_search import MeshSearch, SizesOfModel
from trainfit.scaling.scale_question import ScaleQuestion, WantedCapture, depths_of, refusal
from trainfit.scaling.scale_text import parse_dimensions, parse_global_batch, parse_world_sizes
from trainfit.scaling.shape_captures import ShapeCaptures
from trainfit.scaling.winners import Winners
from trainfit.traces.ranks import Cluster
from trainfit.traces.trace import Trace

CONFIRM = ("best", "all", "none")
_MOST_STAGES = 16
_MOST_CONTEXT = 16
_MOST_EXPERT_RANKS = 64
_LONG = 32768
"""From so many tokens on, dividing sequences is worth a look."""


def scale(
    target: str | Build,
    world_sizes: str | int | Sequence[int] = "8..1024",
    *,
    device: str | Device = "h100",
    options: StepOptions | None = None,
    task: str | None = None,
    global_batch: str | int | None = None,
    dimensions: str | Sequence[str] | None = None,
    budget: int | str | None = None,
    allocator: str | AllocatorOptions | None = "default",
    gpus_per_node: int = 8,
    network: str | float | None = None,
    confirm: str = "best",
    seconds_limit: float = 10.0,
    progress: Progress | None = None,
    measuring: Measuring | None = None,
) -> Scale:
    """Find, for each number of GPUs, the mesh, micro-batch and checkpointing with the most throughput.

    `world_sizes` are numbers, or a text such as `8..1024` (each twice the one before) or `8,16,64`.
    `global_batch` is what one step of all GPUs trains on, in sequences (`512`) or tokens (`4M tokens`);
    without it there is no accumulation, and the micro-batch is the fastest. `dimensions` are those that a
    mesh may have, as in `fsdp,tp`.

    A model is captured with few layers, for few sizes; all else is worked out and said to be `derived`. With
    `confirm`, the winner that has the most throughput per GPU (`best`) or that of each size (`all`) is
    captured whole, and its plan, looked for during `seconds_limit`, is certified.
    """
    with heard_by(progress, measuring):
        asked = ScaleRequest(
            target, parse_world_sizes(world_sizes), device, options, task, budget, allocator, confirm
        )
        node = Cluster(gpus_per_node=gpus_per_node, network_bytes_per_second=_speed(network))
        return asked.found(node, global_batch, dimensions, seconds_limit)


def _speed(network: str | float | None) -> float | None:
    return parse_network(network) if isinstance(network, str) else network


@dataclass
class ScaleRequest:
    """What is asked. What makes no sense about it is refused before anything is captured."""

    target: str | Build
    world_sizes: tuple[int, ...]
    device: str | Device
    options: StepOptions | None = None
    task: str | None = None
    budget: int | str | None = None
    allocator: str | AllocatorOptions | None = "default"
    confirm: str = "best"
    watch: Stopwatch = field(default_factory=Stopwatch)

    def __post_init__(self) -> None:
        """Check what can be checked at once."""
        if isinstance(self.target, Trace):
            raise OptionError(
                "a trace is of one rank of one mesh; give the target that it was captured from."
            )
        if self.confirm not in CONFIRM:
            raise OptionError(f"--confirm must be one of {', '.join(CONFIRM)}, got {self.confirm!r:.40}.")
        self.device = self.device if isinstance(self.device, Device) else find_device(self.device)
        if self.device.kind != "cuda" or not self.device.has_speed:
            raise DeviceError(
                f"scale looks for the fastest mesh of GPUs, and {self.device.name} is none whose speed is "
                "known; name one that `trainfit devices` lists, as in --device h100."
            )
        if self.options is not None and self.options.batch is not None:
            raise OptionError(
                "--batch: the micro-batch is what is looked for; say what a step of all GPUs trains on by "
                "--global-batch."
            )

    def found(
        self,
        node: Cluster,
        global_batch: str | int | None,
        dimensions: str | Sequence[str] | None,
        seconds_limit: float,
    ) -> Scale:
        """Look at every size."""
        node.check()
        assert isinstance(self.device, Device)
        budget = None if self.budget is None else bytes_of_budget(self.budget, self.device)
        whole, allowed = parse_global_batch(global_batch), parse_dimensions(dimensions)
        question = ScaleQuestion(self.target, self.device, self.options or StepOptions(), self.task, node)
        depths, depth = depths_of(question)
        seq = self._seq(question)
        batch = None if whole is None else whole.in_sequences(seq)
        chosen = allowed or self._usual_dimensions(question, seq, batch)
        ahead = CapturesAhead(question)
        captures = ShapeCaptures(ahead, depths, on_capture=lambda: self.watch.lap("capture"))
        judge = MeshJudge(captures, depth, named_options(self.allocator), budget)
        model = sizes_of_model(question, chosen, max(self.world_sizes), depth if judge.can_cut else 1)
        search = MeshSearch(judge, chosen, model, batch)
        winners = Winners(judge, seconds_limit, seq)
        with closing(ahead):
            self._look(search, winners)
        words = "" if whole is None else whole.words
        return winners.result(batch, words, chosen, self.watch.seconds)

    def _look(self, search: MeshSearch, winners: Winners) -> None:
        """Look at every size, and confirm what wins."""
        search.announce(self.world_sizes)
        self._first_look(search)
        search.expect(self.world_sizes)
        for number, ranks in enumerate(self.world_sizes, start=1):
            with as_part_of(f"{ranks:,} GPUs ({number} of {len(self.world_sizes)})"):
                judged, left_out = search.of_size(ranks)
            winners.add(ranks, judged, left_out)
            winners.expect(self.confirm)
            self.watch.lap("search")
        winners.confirm_those(self.confirm)
        self.watch.lap("confirm")

    def _seq(self, question: ScaleQuestion) -> int | None:
        try:
            return question.request(WantedCapture(MeshSizes(), 1)).found().settings.seq
        except TrainfitError:
            if isinstance(self.target, str):
                raise
            return None

    def _usual_dimensions(
        self, question: ScaleQuestion, seq: int | None, batch: int | None
    ) -> tuple[str, ...]:
        """Return the dimensions to look at if nobody says: `cp` and `ep` only where there is a reason."""
        if question.runs_own_code:
            return ("fsdp",)  # what other names mean, only the author of a function knows
        few = batch is not None and batch < max(self.world_sizes) // 8
        long = seq is not None and seq >= _LONG
        experts = refusal(question, MeshSizes(ep=2), 1) is None
        more = (("cp", few or long), ("ep", experts))
        return ("replicate", "fsdp", "tp", "pp", *(name for name, wanted in more if wanted))

    def _first_look(self, search: MeshSearch) -> None:
        """Capture what bounds all meshes from below: parameters, gradients and optimizer state."""
        sizes = [one for one in search.candidates(max(self.world_sizes)) if one.pp == 1]
        for one in sizes:
            with as_part_of("the first capture"):
                state = search.judge.state_bytes(one)
            if state:
                search.state_bytes = state
                return
        refused = search.judge.captures.refused
        raise OptionError(next(iter(refused.values()), f"there is no mesh of {self.world_sizes[-1]:,} GPUs."))


def sizes_of_model(
    question: ScaleQuestion, dimensions: Sequence[str], ranks: int, layers: int
) -> SizesOfModel:
    """Return the sizes along each dimension that a model can be divided by, as it says before it is built."""

    def possible(name: str, most: int) -> tuple[int, ...]:
        if name not in dimensions:
            return (1,)
        sizes = [size for size in powers_of_two(min(most, ranks)) if size > 1]
        return (1, *(s for s in sizes if refusal(question, MeshSizes(**{name: s}), 1) is None))

    stages = [size for size in powers_of_two(min(_MOST_STAGES, layers, ranks)) if "pp" in dimensions]
    first = next((size for size in stages if size > 1), None)
    if first is not None and refusal(question, MeshSizes(pp=first, fsdp=2), first) is not None:
        stages = []
    tensor = possible("tp", question.cluster.gpus_per_node)
    context, experts = possible("cp", _MOST_CONTEXT), possible("ep", _MOST_EXPERT_RANKS)
    return SizesOfModel(tensor, context, tuple(stages) or (1,), experts)
