"""A cluster as people write it: what is read, and one clear message for what makes no sense."""

from __future__ import annotations

import pytest

from trainfit.devices.cluster_text import parse_network, read_cluster
from trainfit.errors import OptionError
from trainfit.traces.ranks import Cluster

Flags = dict[str, object]
NOTHING: Flags = dict.fromkeys(("world_size", "rank", "gpus_per_node", "mesh", "network"))


def read(**flags: object) -> tuple[Cluster | None, bool]:
    return read_cluster(**{**NOTHING, **flags})  # type: ignore[arg-type]


def test_without_flags_there_is_no_cluster() -> None:
    assert read() == (None, False)


def test_a_mesh_says_the_world_size() -> None:
    assert read(mesh="dp=8,tp=4") == (Cluster(32, mesh=(("dp", 8), ("tp", 4))), False)
    assert read(mesh=" dp = 8 , tp = 4 ", world_size=32)[0] == Cluster(32, mesh=(("dp", 8), ("tp", 4)))


def test_every_flag_is_read() -> None:
    cluster, worst = read(world_size=16_384, rank="5", gpus_per_node=4, network="50GB/s")
    assert cluster == Cluster(16_384, 5, 4, (), 50e9)
    assert not worst
    assert read(world_size=4, rank="worst") == (Cluster(4), True)


@pytest.mark.parametrize(
    ("text", "speed"),
    [("50GB/s", 50e9), ("400Gbit/s", 50e9), ("12.5 GB/s", 12.5e9), ("1GiB/s", 2**30), ("800bit/s", 100.0)],
)
def test_speeds_in_bytes_and_bits(text: str, speed: float) -> None:
    assert parse_network(text) == speed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"world_size": 30, "mesh": "dp=8,tp=4"}, r"dp=8,tp=4 has 32 ranks, but the world size is 30"),
        ({"world_size": 64, "rank": "64"}, r"no rank 64 in a world of 64: ranks go from 0 to 63"),
        ({"world_size": 64, "rank": "first"}, r"--rank 'first' is neither a rank .* nor worst"),
        ({"world_size": 0}, r"world size must be a whole number from 1 to"),
        ({"world_size": 8, "gpus_per_node": 0}, r"GPUs per node must be a whole number from 1 to"),
        ({"rank": "3"}, r"--rank is about one of several processes: .*--world-size 64"),
        ({"gpus_per_node": 4}, r"--gpus-per-node is about one of several processes"),
        ({"network": "50GB/s"}, r"--network is about one of several processes"),
        ({"world_size": 8, "network": "fast"}, r"--network 'fast' is not a speed: write it like 50GB/s"),
        ({"world_size": 8, "network": "50"}, r"--network '50' is not a speed"),
        ({"world_size": 8, "network": "50Gb/s"}, r"--network '50Gb/s' is not a speed.*400Gbit/s \(bits\)"),
        ({"world_size": 8, "network": "0GB/s"}, r"less than a byte per second"),
        ({"mesh": "dp"}, r"--mesh 'dp': 'dp' is not a dimension; write it like dp=8,tp=4"),
        ({"mesh": ""}, r"--mesh '': '' is not a dimension"),
        ({"mesh": "dp=none"}, r"the size of dp must be a whole number from 1 to .*got 'none'"),
        ({"mesh": "dp=0"}, r"the size of dp must be a whole number from 1"),
        ({"mesh": "dp=2,dp=4"}, r"has the dimension dp twice"),
    ],
)
def test_one_message_for_a_mistake(flags: Flags, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        read(**flags)
