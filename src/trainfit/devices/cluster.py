"""The cluster that a device is part of: `Cluster`, under the name by which it is given beside a device.

The class is in `traces/ranks.py`, because a trace says for which rank it was captured.
"""

from trainfit.traces.ranks import Cluster

__all__ = ["Cluster"]
