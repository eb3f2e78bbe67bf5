"""Silent process groups: the same results as gloo, and no memory that the profiler could see."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import ReduceOp

from trainfit.verifying.tensor_bytes import parts_of, reduced, whole

SCRIPT = Path(__file__).parent / "ranks" / "exchanges.py"


def exchanged(ranks: int, folder: Path) -> list[Any]:
    file = folder / "found.pt"
    subprocess.run([sys.executable, str(SCRIPT), str(ranks), str(file)], check=True, timeout=240)
    found: list[Any] = torch.load(file)
    return found


def test_two_ranks_get_what_gloo_gives_them_bit_by_bit(tmp_path: Path) -> None:
    ranks = exchanged(2, tmp_path)
    assert len(ranks) == 2
    for gloo, silent, seen in ranks:
        assert set(gloo) == set(silent)
        assert len(gloo) >= 40
        assert {
            f"{what} of {name}" for what in ("losses", "weights") for name in ("fsdp-clip", "ddp", "tp")
        } <= set(gloo)
        assert [name for name in gloo if gloo[name] != silent[name]] == []
        assert seen == 0


def test_four_ranks_differ_only_by_the_order_of_sums(tmp_path: Path) -> None:
    loose = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-2, "bfloat16": 1e-1, "int64": 0.0}
    for gloo, silent, seen in exchanged(4, tmp_path):
        for name in gloo:
            (kind, one), (other_kind, other) = gloo[name], silent[name]
            bound = loose[kind.removeprefix("torch.")]
            assert kind == other_kind
            assert np.allclose(one, other, rtol=bound, atol=bound), name
        assert gloo["broadcast"] == silent["broadcast"]
        assert seen == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int32], ids=str)
@pytest.mark.parametrize(
    ("operation", "function"),
    [(ReduceOp.SUM, torch.add), (ReduceOp.PRODUCT, torch.mul), (ReduceOp.MAX, torch.maximum)],
    ids=["sum", "product", "max"],
)
def test_sums_are_those_of_torch(dtype: torch.dtype, operation: Any, function: Any) -> None:
    torch.manual_seed(0)
    tensors = [(torch.randn(1000) * 100).to(dtype) for _ in range(3)]
    expected = function(function(tensors[0], tensors[1]), tensors[2])
    result = torch.empty_like(expected)
    whole(result).write(reduced([whole(tensor).read() for tensor in tensors], dtype, operation))
    assert torch.equal(result, expected)


def test_bfloat16_rounds_to_even_and_keeps_what_is_no_number() -> None:
    values = torch.tensor([1.0, 1.0, float("nan"), float("inf"), -0.0, 3e38], dtype=torch.bfloat16)
    others = torch.tensor([2**-8, 3 * 2**-8, 1.0, 1.0, -0.0, 3e38], dtype=torch.bfloat16)
    result = torch.empty_like(values)
    whole(result).write(reduced([whole(values).read(), whole(others).read()], values.dtype, ReduceOp.SUM))
    expected = values + others
    assert torch.equal(result[[0, 1, 3, 4, 5]], expected[[0, 1, 3, 4, 5]])
    assert result[2].isnan()
    assert torch.signbit(result[4])


def test_an_average_is_the_sum_by_the_number_of_ranks() -> None:
    tensors = [torch.tensor([1.0, 2.0]), torch.tensor([2.0, 5.0]), torch.tensor([6.0, 5.0])]
    result = torch.empty(2)
    whole(result).write(reduced([whole(one).read() for one in tensors], torch.float32, ReduceOp.AVG))
    assert result.tolist() == [3.0, 4.0]


def test_strided_tensors_are_written_where_they_are() -> None:
    base = torch.zeros(3, 4)
    whole(base[:, 1:3].t()).write(whole(torch.arange(6.0).reshape(2, 3)).read())
    assert base.tolist() == [[0, 0, 3, 0], [0, 1, 4, 0], [0, 2, 5, 0]]


def test_parts_go_by_sizes_or_evenly() -> None:
    tensor = torch.arange(12).reshape(6, 2)
    assert [part.words.shape[0] for part in parts_of(tensor, 3, [1, 2, 3])] == [1, 2, 3]
    assert parts_of(tensor, 3)[1].words.tolist() == [4, 5, 6, 7]
    with pytest.raises(RuntimeError, match=r"of shape \(6, 2\) cannot be divided evenly among 5 ranks"):
        parts_of(tensor, 5)


def test_other_sizes_are_refused() -> None:
    with pytest.raises(RuntimeError, match="has sent 8 bytes where this one expects 12"):
        whole(torch.zeros(3)).write(whole(torch.zeros(2)).read())


def test_what_cannot_be_exchanged_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="sparse tensors cannot be exchanged"):
        whole(torch.eye(2).to_sparse())
    bits = whole(torch.zeros(2, dtype=torch.float8_e4m3fn)).read()
    with pytest.raises(NotImplementedError, match="float8_e4m3fn cannot be added up"):
        reduced([bits, bits], torch.float8_e4m3fn, ReduceOp.SUM)
