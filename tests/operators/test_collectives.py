"""Every operator of `torch.distributed` has a kind, or is known to have none."""

from __future__ import annotations

import pytest
import torch
import torch.distributed._functional_collectives  # registers the functional spellings

from trainfit.operators.collectives import NAMESPACES, collective_kind, communicates

KINDS = {
    *("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "reduce", "gather", "scatter"),
    *("send", "recv", "barrier"),
}
WITHOUT = {"wait_tensor", "check_for_nan", "_wrap_tensor_autograd", "mesh_get_process_group"}


def names(namespace: str) -> set[str]:
    found = (schema.name.split("::") for schema in torch._C._jit_get_all_schemas())
    return {name for where, name in found if where == namespace}


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_every_operator_that_communicates_has_a_kind(namespace: str) -> None:
    assert names(namespace)
    for name in names(namespace):
        full = f"{namespace}.{name}.default"
        assert communicates(full)
        assert (collective_kind(full) is None) == (name in WITHOUT), name
        assert collective_kind(full) in {None, *KINDS}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("c10d.allreduce_.default", "all_reduce"),
        ("c10d._allgather_base_.default", "all_gather"),
        ("c10d.allgather_into_tensor_coalesced_.default", "all_gather"),
        ("c10d.reduce_scatter_tensor_coalesced_.default", "reduce_scatter"),
        ("c10d.reduce_.default", "reduce"),
        ("_c10d_functional.all_gather_into_tensor_out.default", "all_gather"),
        ("_c10d_functional.all_reduce_coalesced_.default", "all_reduce"),
        ("_c10d_functional_autograd.all_to_all_single.default", "all_to_all"),
        ("c10d_functional.reduce_scatter_tensor.default", "reduce_scatter"),
        ("aten.gather.default", None),
        ("aten.scatter_.src", None),
        ("torch.synchronize", None),
    ],
)
def test_kinds_by_name(name: str, kind: str | None) -> None:
    assert collective_kind(name) == kind


def test_every_kind_exists() -> None:
    found = {collective_kind(f"{space}.{name}.default") for space in NAMESPACES for name in names(space)}
    assert found - {None} == KINDS
