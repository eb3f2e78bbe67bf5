"""The compiler is not loaded for an eager step, compiled code runs eagerly, and nothing of that stays."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Each case is a process of its own: whether the compiler is loaded is a matter of the whole process.
_STEP = """
import sys
import torch
import trainfit

def build_with(prepare):
    def build():
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 8))
        model = prepare(model) or model
        optimizer = torch.optim.AdamW(model.parameters())
        inputs = torch.randn(4, 8)
        def run():
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.state_dict()
            return loss
        return trainfit.Step(model=model, optimizer=optimizer, run=run)
    return build
"""


def _passes(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", _STEP + code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_an_eager_step_does_not_load_the_compiler_which_then_works_as_ever(device: str) -> None:
    _passes(f"""
trainfit.capture(build_with(lambda model: None), device={device!r})
assert "torch._dynamo" not in sys.modules and "torch._dynamo.config" not in sys.modules
kept_out = [torch.optim.Optimizer.zero_grad, torch.optim.Optimizer.add_param_group]
assert not any(hasattr(function.__wrapped__, "__dynamo_disable") for function in kept_out)

graphs = []
def backend(graph, inputs):
    graphs.append(graph)
    return graph
compiled = torch.compile(lambda x: x.sin() + 1, backend=backend)
assert compiled(torch.zeros(2)).tolist() == [1.0, 1.0] and len(graphs) == 1
import torch._dynamo
assert torch._dynamo.config is sys.modules["torch._dynamo.config"]
assert "trainfit" not in type(torch._dynamo).__module__
""")


def test_a_step_that_compiles_runs_eagerly_and_the_compiler_is_as_before_afterwards() -> None:
    _passes("""
graphs = []
def backend(graph, inputs):
    graphs.append(graph)
    return graph
def prepare(model):
    import torch._dynamo as kept
    assert kept.config.recompile_limit in (8, 9), "9 when the step, which names no device, is begun again"
    torch._dynamo.config.recompile_limit = 9
    return torch.compile(model, backend=backend)

trace = trainfit.capture(build_with(prepare), device="h100")
rules = torch._dynamo.trace_rules.get_torch_obj_rule_map()
ours = [name for name in map(repr, rules) if "trainfit" in name]
assert torch.cuda.is_available in rules and not ours, "it knows torch's functions, not our stand-ins"
assert not graphs, "nothing is compiled during a capture"
assert torch._dynamo.config.recompile_limit == 9
assert torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(1)).item() == 1.0
assert len(graphs) == 1, "and it is again afterwards"
""")


def test_the_compilers_settings_are_asked_of_it_where_it_is_loaded() -> None:
    _passes("""
import torch._dynamo
before = torch._dynamo
trainfit.capture(build_with(lambda model: None))
assert sys.modules["torch._dynamo"] is before and torch._dynamo is before
""")
