"""Collectives: seconds computed by hand from latencies, links and the steps of each algorithm."""

from __future__ import annotations

import pytest

from trainfit.costs.collective_costs import (
    RING,
    USUAL_NETWORK,
    Links,
    Reach,
    collective_cost,
    collective_seconds,
    link_seconds,
    reach_of,
)
from trainfit.devices.device_table import find_device
from trainfit.devices.efficiency import Constants
from trainfit.traces.ranks import Cluster, Collective
from trainfit.traces.trace import Signature

A100 = Links(inside=300e9, network=50e9, network_share=0.9)
H100 = Links(inside=450e9, network=50e9, switch_adds=True, network_share=0.9)
NODE, TWO_NODES = Reach(8, 1), Reach(16, 2)
LARGE = 8_000_000_000


def test_an_all_gather_in_a_node_sends_seven_eighths_over_nvlink() -> None:
    by_hand = 8.4e-6 + 7 * 3.4e-6 + LARGE * 7 / 8 / (0.8 * 300e9)
    assert collective_seconds("all_gather", LARGE, NODE, A100) == pytest.approx(by_hand)
    assert collective_seconds("reduce_scatter", LARGE, NODE, A100) == pytest.approx(by_hand)


def test_an_all_reduce_sends_twice_as_much_in_twice_the_steps() -> None:
    by_hand = 8.4e-6 + 14 * 3.4e-6 + 2 * LARGE * 7 / 8 / (0.8 * 300e9)
    assert collective_seconds("all_reduce", LARGE, NODE, A100) == pytest.approx(by_hand)


def test_the_switch_of_a_hopper_node_is_faster_than_a_ring() -> None:
    by_hand = 25e-6 + 2 * LARGE * 7 / 8 / (0.85 * 450e9)
    assert collective_seconds("all_reduce", LARGE, NODE, H100) == pytest.approx(by_hand)
    assert collective_seconds("all_reduce", LARGE, TWO_NODES, H100) > by_hand


def test_little_data_takes_the_protocol_with_the_least_latency() -> None:
    ring = 6.6e-6 + 14 * 0.6e-6
    assert collective_seconds("all_reduce", 0, NODE, A100) == pytest.approx(ring)
    assert collective_seconds("barrier", 0, NODE, A100) == pytest.approx(ring)


def test_between_nodes_the_slower_of_nvlink_and_all_adapters_of_a_node_counts() -> None:
    # Eight adapters together are faster than NVLink: 8 x 0.9 x 50 against 0.8 x 300 GB/s.
    by_nvlink = 8.4e-6 + 14 * 3.4e-6 + 14e-6 + LARGE * 15 / 16 / (0.8 * 300e9)
    assert collective_seconds("all_gather", LARGE, TWO_NODES, A100) == pytest.approx(by_nvlink)
    # One rank per node has one adapter, and no NVLink on its way.
    alone = 8.4e-6 + 15 * 14e-6 + LARGE * 15 / 16 / (0.9 * 50e9)
    assert collective_seconds("all_gather", LARGE, Reach(16, 16), A100) == pytest.approx(alone)


def test_a_tree_beats_the_ring_where_latency_counts_and_nodes_are_many() -> None:
    reach = Reach(1024, 128)
    by_hand = 6.8e-6 + 2 * (7 * 0.6e-6 * 1.8 + 7 * 5.0e-6)
    assert collective_seconds("all_reduce", 0, reach, A100) == pytest.approx(by_hand)


def test_a_flat_all_gather_over_a_large_cluster_is_bound_by_latency() -> None:
    reach = Reach(16_384, 2048)
    steps, across = 16_383, 2047
    by_protocol = [p.base + (steps - across) * p.nvlink * p.beside_network + across * p.network for p in RING]
    assert collective_seconds("all_gather", 0, reach, A100) == pytest.approx(min(by_protocol))
    # From 20 to 77 ms, by protocol.
    assert min(by_protocol) == pytest.approx(21e-3, rel=0.01)
    assert max(by_protocol) == pytest.approx(77.4e-3, rel=0.01)


def test_an_exchange_between_nodes_goes_through_each_rank_s_own_adapter() -> None:
    # Of 16 parts, one stays, seven go to the node and eight to the other one.
    outside = LARGE * 8 / 16 / (0.9 * 50e9)
    assert collective_seconds("all_to_all", LARGE, TWO_NODES, A100) == pytest.approx(22.4e-6 + outside)
    inside = LARGE * 7 / 8 / (0.8 * 300e9)
    assert collective_seconds("all_to_all", LARGE, NODE, A100) == pytest.approx(11.8e-6 + inside)


def test_a_send_takes_the_link_to_the_next_stage() -> None:
    assert collective_seconds("send", 10**9, Reach(4, 4), A100) == pytest.approx(22.4e-6 + 1 / 45)
    assert collective_seconds("recv", 10**9, Reach(4, 1), A100) == pytest.approx(11.8e-6 + 1 / 240)


def test_a_group_of_one_exchanges_nothing() -> None:
    assert collective_seconds("all_reduce", LARGE, Reach(1, 1), A100) == 0.0


@pytest.mark.parametrize("kind", ["all_gather", "all_reduce", "all_to_all", "broadcast", "send"])
def test_more_bytes_never_take_less_time(kind: str) -> None:
    for reach in (NODE, TWO_NODES, Reach(64, 64)):
        times = [collective_seconds(kind, 4**power, reach, H100) for power in range(18)]
        assert times == sorted(times)


def test_which_nodes_a_group_is_on() -> None:
    cluster = Cluster(world_size=32, gpus_per_node=8)

    def reach(size: int, *ranks: tuple[int, int, int]) -> Reach:
        return reach_of(Collective("all_reduce", size, "g", 1, ranks), cluster)

    assert reach(4, (0, 3, 1)) == Reach(4, 1)  # tp=4, innermost
    assert reach(8, (0, 28, 4)) == Reach(8, 4)  # dp=8 around it
    assert reach(32) == Reach(32, 4)  # not known: side by side
    assert reach(8, (0, 28, 4)).per_node == 2


def test_links_come_from_the_device_and_the_network_from_the_user() -> None:
    h100, a10 = find_device("h100-sxm-80gb"), find_device("a10")
    assert Links.of(h100, None) == Links(450e9, 50e9, True, switch_adds=True, pcie=64e9, nvlink_gpus=8)
    assert Links.of(h100, Cluster(8, network_bytes_per_second=12.5e9)).network == 12.5e9
    assert Links.of(a10, None) == Links(32e9, USUAL_NETWORK, nvlink=False, switch_adds=False, pcie=32e9)
    # A node of A100s has adapters of 200 Gbit/s; two cards on a bridge have no switch that adds up.
    assert Links.of(find_device("a100-sxm-80gb"), None).network == 25e9
    assert not Links.of(find_device("h100-nvl-94gb"), None).switch_adds
    constants = Constants(link_share=0.5, network_share=0.25)
    assert Links.of(h100, None, constants).between_nodes(Reach(16, 2)) == 8 * 0.25 * 50e9
    assert Links.of(h100, None, constants).within_node(NODE) == 0.5 * 450e9


def test_bridges_connect_two_and_a_larger_group_takes_pcie() -> None:
    bridged = Links(inside=300e9, network=50e9, pcie=32e9, nvlink_gpus=2)
    cluster = Cluster(world_size=8, gpus_per_node=4)

    def seconds(*ranks: tuple[int, int, int], size: int) -> float:
        collective = Collective("all_gather", size, "g", LARGE, ranks)
        return collective_seconds("all_gather", LARGE, reach_of(collective, cluster, 2), bridged)

    pair = 8.4e-6 + 3.4e-6 + LARGE / 2 / (0.8 * 300e9)
    assert seconds((0, 1, 1), size=2) == pytest.approx(pair)
    four = 8.4e-6 + 3 * 5.7e-6 + LARGE * 3 / 4 / (0.8 * 32e9)
    assert seconds((0, 3, 1), size=4) == pytest.approx(four)
    # Two that are not on one bridge, though they are two.
    assert seconds((1, 2, 1), size=2) == pytest.approx(8.4e-6 + 5.7e-6 + LARGE / 2 / (0.8 * 32e9))
    assert reach_of(Collective("all_gather", 4, "g", 1, ((0, 6, 2),)), cluster, 2) == Reach(4, 2, 4)


def test_one_rank_on_each_node_exchanges_by_halves_where_latency_counts() -> None:
    reach = Reach(128, 128)
    by_hand = 8e-6 + 7 * 14e-6 + 1e6 * 127 / 128 / (0.75 * 0.9 * 50e9)
    assert collective_seconds("all_gather", 10**6, reach, A100) == pytest.approx(by_hand)
    ring = 8.4e-6 + 127 * 14e-6 + LARGE * 127 / 128 / (0.9 * 50e9)
    assert collective_seconds("all_gather", LARGE, reach, A100) == pytest.approx(ring)


def test_switches_add_up_in_each_node_and_a_tree_between_the_nodes() -> None:
    reach = Reach(64, 8)
    # Eight adapters of 45 GB/s carry 360 GB/s, less than 0.85 of NVLink's 450.
    by_hand = 25e-6 + 2 * 3 * 14e-6 + 2 * 10**8 / (8 * 0.9 * 50e9)
    assert collective_seconds("all_reduce", 10**8, reach, H100) == pytest.approx(by_hand)
    assert collective_seconds("all_reduce", 10**8, reach, A100) > by_hand


def test_the_groups_of_a_node_have_its_adapters_together_and_none_has_more_than_its_part() -> None:
    """Eight groups of two, on two nodes, send through one adapter each; one of sixteen through eight."""
    one_of_eight = collective_seconds("all_gather", LARGE, Reach(2, 2), H100)
    alone = collective_seconds("all_gather", LARGE, Reach(16, 2), H100)
    assert one_of_eight == pytest.approx(LARGE / 2 / (0.9 * 50e9), rel=1e-3)
    assert alone == pytest.approx(LARGE * 15 / 16 / (8 * 0.9 * 50e9), rel=1e-2)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"])
def test_more_ranks_and_slower_links_never_take_less_time(kind: str) -> None:
    for size in (0, 10**4, 10**6, 10**9):
        # A part of the bytes that grows with the ranks stays at home with fewer of them.
        by_ranks = [
            collective_seconds(kind, size, Reach(8 * nodes, nodes), H100) for nodes in (2, 4, 16, 128)
        ]
        assert by_ranks == sorted(by_ranks)
        slower = [
            collective_seconds(kind, size, Reach(64, 8), Links(450e9, speed)) for speed in (1e11, 5e10, 1e9)
        ]
        assert slower == sorted(slower)
        nearer = [collective_seconds(kind, size, NODE, Links(speed, 5e10)) for speed in (9e11, 4.5e11, 3e10)]
        assert nearer == sorted(nearer)


def test_how_long_each_link_is_busy() -> None:
    """Within a node only NVLink is; between nodes the ring passes both, and the slower one all the time."""
    node = link_seconds("all_gather", LARGE, NODE, H100)
    assert (node.node, node.network) == (pytest.approx(LARGE * 7 / 8 / 360e9), 0.0)
    both = link_seconds("all_reduce", LARGE, Reach(64, 8), H100)
    sent = 2 * LARGE * 63 / 64
    assert (both.node, both.network) == (pytest.approx(sent / 360e9), pytest.approx(sent / 360e9))
    apart = link_seconds("reduce_scatter", LARGE, Reach(8, 8), H100)
    assert (apart.node, apart.network) == (0.0, pytest.approx(LARGE * 7 / 8 / 45e9))
    stage = link_seconds("send", 10**9, Reach(4, 4), H100)
    assert (stage.node, stage.network) == (0.0, pytest.approx(1 / 45))


def test_the_cost_says_what_it_is_bound_by() -> None:
    def cost(size: int):  # type: ignore[no-untyped-def]
        exchanged = Collective("all_gather", 8, "g", size, ((0, 7, 1),))
        return collective_cost(Signature("c10d.x", (), (), "", False, False, False, exchanged), A100, None)

    assert (cost(1024).bound, cost(LARGE).bound) == ("latency", "network")
    assert cost(LARGE).kind == "communication"
    assert collective_cost(Signature("aten.mm", (), (), "", False, False, False), A100, None) is None
