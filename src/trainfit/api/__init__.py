"""The Python API, which the command line calls too. Its files are loaded when they are used.

`request.py` is what every question about a step begins with: its device, its trace, its prices, and how long
that took (`stopwatch.py`). `predict.py` has `capture`, `price` and `estimate`; `choose.py` has `plan` and
`frontier`; `prove.py` has `verify`, `prove_ranks.py` that of several processes, each of which is predicted in
another one (`rank_prediction.py`); `arrange.py` has `order`; `gauge_machine.py` has `calibrate`.
"""
