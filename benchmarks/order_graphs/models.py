"""The joint forward and backward graphs of real models, traced without running them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cases import all_cases
from order_graphs.branching_models import BRANCHING
from trainfit import StepOptions
from trainfit.order_fronts.fx import buffer_graph
from trainfit.order_fronts.joint import joint_graph_without_memory
from trainfit.ordering.graph import BufferGraph
from trainfit.targets import load

BUILT_IN = {
    "gpt2-tiny": StepOptions(batch=4, seq=256),
    "llama-tiny": StepOptions(batch=4, seq=256),
    "bert-tiny": StepOptions(batch=8, seq=128),
    "vit-tiny": StepOptions(batch=16),
    "resnet-tiny": StepOptions(batch=16),
    "resnet-18": StepOptions(batch=4),
    "gpt2": StepOptions(batch=8, seq=1024),
    "vit-b-16": StepOptions(batch=32),
}
TRANSFORMERS = ("hf-llama", "hf-qwen2", "hf-swin", "hf-convnext", "hf-mobilevit")
MODELS = (*BUILT_IN, *TRANSFORMERS, *BRANCHING)


def joint_graphs(names: Sequence[str] | None = None) -> Iterator[tuple[str, BufferGraph]]:
    """Yield the chosen models' graphs, or all of them."""
    cases = all_cases()
    for name in names or MODELS:
        if name in BUILT_IN:
            build = load(name, BUILT_IN[name]).build
        else:
            build = BRANCHING[name] if name in BRANCHING else cases[name].build
        yield name, buffer_graph(joint_graph_without_memory(build))
