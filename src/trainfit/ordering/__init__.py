"""Ordering: run the nodes of a graph in the order that needs the least memory at its peak.

`graph.py` is what comes in and `simulator_json.py` its file; `order_timeline.py` says what an order needs.
`ordering_problem.py` is the graph as numbers. `heuristics.py` finds orders in one pass, `tighten.py` improves
them (both with `ready_nodes.py`). `bound.py` (with `least_memory.py`) says what no order can be below,
`splitting.py` splits, `exact.py` and `beam.py` search from both ends (`directions.py`). `best_order.py` puts
them together; `found_order.py` is what leaves.
"""
