"""What must hold for every file: it is refused with one message, or what was read can be used."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

from damaged_files import DamagedFile
from results_by_hand import bytes_of_step, same_bytes
from workbench import DEVICE, workbench

from trainfit import capturing
from trainfit.api import choose, predict
from trainfit.api.arrange import order_anything
from trainfit.api.request import Request
from trainfit.applying import attach_plan
from trainfit.devices.device_table import find_device, read_device
from trainfit.devices.measured_cache import Entry, Figures, Machine, MeasuredCache
from trainfit.errors import PlanError, TrainfitError, UserCodeError
from trainfit.models.recipe import StepOptions
from trainfit.plans import plan_store
from trainfit.plans.plan_origin import plan_differences
from trainfit.report import json_result
from trainfit.report.reading import estimate_data, order_data, plan_data
from trainfit.report.tables import show
from trainfit.report.text_devices import device_view
from trainfit.report.text_estimates import estimate_view
from trainfit.report.text_orders import order_view
from trainfit.report.text_plans import plan_view
from trainfit.targets import load
from trainfit.traces import trace_store as store

LONGEST_MESSAGE = 12_000
"""Names of 5,000 characters are among the inputs, and a message may name two."""
MACHINE = Machine("a processor", "2.13.0", 2)
_ENTRY = Entry("aten.mm.default", 1.5e-3, 0.02, load=0.25)


CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 48,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "sliding_window": 4,
    "use_sliding_window": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


@cache
def valid_files() -> dict[str, bytes]:
    """Return one valid file of every kind."""
    bench = workbench()
    trace = bench.folder / "valid.trace"
    store.save_trace(bench.traces["h100"], trace)
    cached = bench.folder / "valid.sqlite"
    with MeasuredCache(MACHINE, cached) as cost_cache:
        cost_cache.store({f"key {number}": _ENTRY for number in range(40)})
        cost_cache.store_figures("host", Figures({"forward_op": 1e-6, "cache_bytes": 1e6}, 0.5))
    return {
        "trace": trace.read_bytes(),
        "plan": (bench.folder / "plan.json").read_bytes(),
        "device": json.dumps(DEVICE).encode(),
        "graph": (bench.folder / "graph.json").read_bytes(),
        "cache": cached.read_bytes(),
        "config": json.dumps(CONFIG).encode(),
    }


def check_file(file: DamagedFile) -> None:
    """Read the file and use what it holds; only our own exceptions may come, with a message of some lines."""
    path = workbench().folder / f"damaged.{file.kind}.json"
    path.write_bytes(file.data)
    try:
        USES[file.kind](path)
    except UserCodeError as error:
        if file.kind == "config":
            return  # transformers has built a model that cannot run
        raise AssertionError(f"our own mistake was taken for the user's:\n{error.user_traceback}") from error
    except TrainfitError as error:
        message = str(error)
        assert message.strip() and len(message) < LONGEST_MESSAGE + len(str(path)), (
            f"a message of {len(message)}"
        )


def _shown(view: object) -> None:
    show(view, io.StringIO())  # type: ignore[arg-type]


def _use_trace(path: Path) -> None:
    trace = store.load_trace(path)
    again = path.with_suffix(".again")
    store.save_trace(trace, again)
    assert store.load_trace(again) == trace, "a trace does not come back as it was saved"
    device = find_device("h100") if trace.device == "cuda" else find_device("cpu")
    device = replace(device, architecture=trace.architecture or device.architecture)
    estimate = predict.estimate(trace, device=device)
    _shown(estimate_view(estimate_data(estimate)))
    json_result.write_json(json_result.result_json(estimate_data(estimate)), str(again))
    order_anything(trace)
    budget = (estimate.peak_bytes + trace.persistent_bytes) // 2
    result = choose.plan_step(Request(trace, device), budget=max(budget, 1), seconds_limit=1.0)
    _shown(plan_view(plan_data(result)))
    json_result.write_json(json_result.result_json(plan_data(result)), str(again))


def _use_plan(path: Path) -> None:
    bench = workbench()
    plan = plan_store.load_plan(path)
    again = path.with_suffix(".again")
    plan_store.save_plan(plan, again)
    assert plan_store.load_plan(again) == plan, "a plan does not come back as it was saved"
    repr(plan)
    plan_differences(plan, bench.traces["h100"], "h100")

    def planned() -> object:
        step = bench.build()
        attach_plan(step.model, plan)
        return step

    try:
        # Whatever a plan says, a model computes what it computed without it.
        assert same_bytes(bytes_of_step(bench.build, 2), bytes_of_step(planned, 2)), (
            "the plan changes results"
        )
    except PlanError:
        return


def _use_device(path: Path) -> None:
    device = read_device(path)
    _shown(device_view(device))
    trace = workbench().traces["cpu" if device.kind == "cpu" else "h100"]
    if device.kind == "cuda":
        trace = replace(trace, architecture=device.architecture)
    estimate = predict.estimate(trace, device=device)
    _shown(estimate_view(estimate_data(estimate)))
    json_result.write_json(json_result.result_json(estimate_data(estimate)), str(path))
    if device.default_budget_bytes > 0:
        _shown(plan_view(plan_data(choose.plan_step(Request(trace, device)))))


def _use_graph(path: Path) -> None:
    result = order_anything(path)
    _shown(order_view(order_data(result)))
    json_result.write_json(json_result.result_json(order_data(result)), str(path))


def _use_cache(path: Path) -> None:
    with MeasuredCache(MACHINE, path) as cached:
        for entry in cached.entries([f"key {number}" for number in range(40)]).values():
            assert entry.seconds >= 0 and entry.spread >= 0
        cached.figures("host")
        cached.store({"new": _ENTRY})
        cached.store_figures("rates", Figures({"fp32": 1.0}, 0.0))
        assert cached.entries(["new"]) == {"new": _ENTRY}, "what was stored is forgotten"


def _use_config(path: Path) -> None:
    target = load(f"hf:{path}", StepOptions(device="cuda", batch=2, seq=8))
    trace = capturing.capture(target.build, device=workbench().h100, settings=target.settings)
    _shown(estimate_view(estimate_data(predict.estimate(trace, device=workbench().h100))))


USES: dict[str, Callable[[Path], None]] = {
    "trace": _use_trace,
    "plan": _use_plan,
    "device": _use_device,
    "graph": _use_graph,
    "cache": _use_cache,
    "config": _use_config,
}
