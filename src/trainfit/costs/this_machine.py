"""This machine: what its processor can do, and what its Python takes around the operators of a step.

Both are measured once and kept in the cache of costs. They are measured again if the machine was busy with
other work then, and is not now.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

from trainfit.basics.doing import doing
from trainfit.costs.table import Host
from trainfit.devices.device_table import Device, this_cpu
from trainfit.devices.hardware import CUDA
from trainfit.devices.measured_cache import Figures, Machine, MeasuredCache
from trainfit.errors import DeviceError
from trainfit.timing.load import LoadMeter, busiest


def refuse_absent(device: Device) -> None:
    """Refuse to measure for a device that is not in this machine."""
    if not device.source.startswith("this machine"):
        raise DeviceError(
            f"costs can only be measured on a device of this machine, and {device.name} is not one; "
            "write --device cpu or --device cuda, or price by --costs roofline."
        )


def machine_of(device: Device) -> Machine:
    """Return what a measurement on this device holds for."""
    import torch

    from trainfit.workspace.conditions import this_processor

    if device.kind == "cuda":
        return Machine(CUDA.properties().name, torch.__version__, 0)
    return this_processor()


def with_speed(
    device: Device, *, refresh: bool = False, cache_path: Path | None = None, meter: LoadMeter | None = None
) -> tuple[Device, float | None]:
    """Complete the description of this machine's processor by its FLOP/s and its bandwidth.

    The second result is the share of the processors that other work took when they were measured.
    """
    with MeasuredCache(machine_of(device), cache_path) as cache:
        found = _figures(cache, "rates", _measure_rates, {"bandwidth"}, refresh, meter)
    flops = {name: rate for name, rate in found.values.items() if name != "bandwidth"}
    speedy = replace(device, bandwidth_bytes_per_second=found.values["bandwidth"], flops=flops)
    return speedy, found.load


def _figures(
    cache: MeasuredCache,
    what: str,
    measure: Callable[[], dict[str, float]],
    names: set[str],
    refresh: bool,
    meter: LoadMeter | None,
) -> Figures:
    """Return figures about the machine: from the cache if it has all of them, else measured now."""
    meter = meter or LoadMeter()
    known = None if refresh else cache.figures(what)
    if known is not None and not names <= set(known.values):
        known = None  # An earlier version of this program has remembered less.
    if known is not None and not meter.should_repeat(known.load):
        return known
    with meter.watching() as watch:
        values = measure()
    fresh = Figures(values, watch.share)
    if known is not None and (fresh.load or 0.0) > (known.load or 0.0):
        return known
    cache.store_figures(what, fresh)
    return fresh


def _measure_rates() -> dict[str, float]:
    import torch

    from trainfit.timing.locality import this_machines_caches
    from trainfit.timing.rates import copy_rate, product_rate
    from trainfit.workspace.processor_faults import kernels_die

    doing("measuring this processor's speed, once")
    rates = {
        "fp32": product_rate(torch.float32),
        "bandwidth": copy_rate(this_machines_caches().last_bytes),
    }
    if not kernels_die("bfloat16"):
        rates["bf16"] = product_rate(torch.bfloat16)
    return rates


def host(
    *,
    distributed: bool = False,
    refresh: bool = False,
    cache_path: Path | None = None,
    meter: LoadMeter | None = None,
) -> tuple[Host, float | None]:
    """Return what this machine takes around the operators of a step that runs on its processor.

    What distributed tensors and FSDP take is measured only for a step that is `distributed`. The second
    result is the share of the processors that other work took when it was measured.
    """
    names = {field.name for field in fields(Host)} - {"runs_kernels", "launch", *_OF_RANKS}
    with MeasuredCache(machine_of(this_cpu()), cache_path) as cache:
        found = _figures(cache, "host", _measure_host, names, refresh, meter)
        values, loads = dict(found.values), [found.load]
        if distributed:
            measure = partial(_measure_distributed, found.values)
            of_ranks = _figures(cache, "host of ranks", measure, set(_OF_RANKS), refresh, meter)
            values |= of_ranks.values
            loads.append(of_ranks.load)
    cache_bytes = int(values.pop("cache_bytes"))
    return Host(runs_kernels=True, cache_bytes=cache_bytes, **values), busiest(loads)


_OF_RANKS = ("wrapped_op", "conversion", "unit_op", "rank_reload")
"""What `timing/distributed_seconds.py` measures."""


def _measure_host() -> dict[str, float]:
    from trainfit.timing.host import host_seconds

    doing("measuring what Python takes around operators, once")
    return host_seconds()


def _measure_distributed(known: Mapping[str, float]) -> dict[str, float]:
    from trainfit.timing.distributed_seconds import distributed_seconds

    doing("measuring what distributed tensors take in Python, once")
    return distributed_seconds(known)
