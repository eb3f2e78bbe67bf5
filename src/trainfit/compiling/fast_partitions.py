"""The core of the search for partitions as it runs here: compiled where that was possible at installation.

Else it is plain Python, of the same source. `TRAINFIT_PARTITION_CORE=python` chooses that; `COMPILED` says
which it is.
"""

from __future__ import annotations

from trainfit.basics.compiled_cores import PARTITIONS
from trainfit.compiling.graph_rows import GraphRows
from trainfit.compiling.partition_judge import FUSED_SHARE, Judgement, PartitionJudge
from trainfit.compiling.peak_relief import relieving
from trainfit.compiling.price_cuts import PriceCuts
from trainfit.compiling.value_worth import least_worth_keeping, worth_keeping

__all__ = [
    "COMPILED",
    "FUSED_SHARE",
    "GraphRows",
    "Judgement",
    "PartitionJudge",
    "PriceCuts",
    "least_worth_keeping",
    "relieving",
    "worth_keeping",
]

_module = PARTITIONS.load()
COMPILED = _module is not None
if COMPILED:
    for _name in __all__[1:]:
        globals()[_name] = getattr(_module, _name)
