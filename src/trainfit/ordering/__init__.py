"""Ordering: run the nodes of a graph in the order that needs the least memory at its peak.

`graph.py` is what comes in and `simulator_json.py` its file; `timeline.py` says what an order needs.
`problem.py` is the graph as numbers. `heuristics.py` (with `ready.py`) finds orders in one pass, and
`tighten.py` improves them. `bound.py` (with `cuts.py`) says what no order can be below,
`decompose.py` splits, `exact.py` and `beam.py` (with `sides.py`) search. `solve.py` puts them together;
`results.py` is what leaves.
"""
