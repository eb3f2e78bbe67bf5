"""Models of transformers through all tools: they return dataclasses, and call modules several times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker as TorchMemTracker

from trainfit.compat.ilp_utils import aggregate_stats, get_peak_memory_runtime_baseline, parse_module_info
from trainfit.compat.mem_tracker import MemTracker
from trainfit.compat.runtime_estimator import RuntimeEstimator
from trainfit.compat.sac_estimator import SACEstimator
from trainfit.compat.sac_ilp import sac_milp

transformers = pytest.importorskip("transformers")
DEVICE = "a100-sxm-40gb"
SMALL = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}
WIDE = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    **SMALL,
}


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=3, n_head=2, n_embd=64, n_positions=64, **SMALL)
    )


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**WIDE))


def albert() -> nn.Module:
    """One layer that is called three times."""
    return transformers.AlbertForMaskedLM(transformers.AlbertConfig(embedding_size=32, **WIDE))


def t5() -> nn.Module:
    config = {"d_model": 64, "num_layers": 2, "num_heads": 2, "d_kv": 32, "d_ff": 128, **SMALL}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(decoder_start_token_id=0, **config))


def training(make: Callable[[], nn.Module]) -> tuple[list[Any], Callable[[], None]]:
    """Return what is there before a step, the model first, and the step."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(4, 64, dtype=torch.int64)

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return [model, optimizer, tokens], step


@pytest.mark.parametrize("make", [gpt2, llama, albert, t5])
def test_a_model_is_planned(make: Callable[[], nn.Module]) -> None:
    with FakeTensorMode():
        (model, *others), step = training(make)
        tracker = MemTracker(device=DEVICE)
        tracker.track_external(model, *others)
        with tracker:
            step()
            tracker.reset_mod_stats()
            step()
        runtimes = RuntimeEstimator(device=DEVICE)
        with runtimes("operator-level-cost-model"):
            step()
        trade_offs = SACEstimator(device=DEVICE)
        with trade_offs("operator-level-cost-model"):
            tokens = torch.zeros(4, 64, dtype=torch.int64)
            model(input_ids=tokens, labels=tokens)
        info = aggregate_stats(model, tracker, runtimes, trade_offs, torch.device("cuda", 0))
    graph = parse_module_info(info)
    root = type(model).__name__
    assert graph.nodes[0]["fqn"] == root
    called = {name for name in runtimes.mod_fw_pre_order if name.split(".")[0] == root}
    assert {node["fqn"] for node in graph.nodes} == called
    peak, milliseconds = get_peak_memory_runtime_baseline(graph)
    assert 0 < milliseconds <= runtimes.total_runtime
    decisions, again, planned = sac_milp(graph, 0.9 * peak / 2**30)
    assert decisions and 0 < again < milliseconds
    assert planned <= 0.9 * peak


@pytest.mark.filterwarnings("ignore:Module is None")  # torch's tracker, of models that return dataclasses
@pytest.mark.parametrize("make", [gpt2, llama, albert, t5])
def test_the_peak_is_torchs(make: Callable[[], nn.Module]) -> None:
    peaks = []
    for kind in (MemTracker, TorchMemTracker):
        with FakeTensorMode():
            things, step = training(make)
            tracker = kind()
            tracker.track_external(*things)
            with tracker:
                step()
                tracker.reset_mod_stats()
                step()
            peaks.append(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
    assert peaks[0] == peaks[1]
