"""How large a parameter is on all ranks together, of which this one has a part."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch import nn


def whole_bytes(parameters: Sequence[nn.Parameter], counted: set[int]) -> int:
    """Return the bytes of a module's parameters as if nobody divided them; 0 if none is divided.

    Those in `counted`, which is added to, are another module's already.
    """
    new = [parameter for parameter in parameters if id(parameter) not in counted]
    counted.update(map(id, new))
    # Loaded by those who divide something; it takes a second or more.
    loaded = sys.modules.get("torch.distributed.tensor")
    if loaded is None or not any(isinstance(parameter, loaded.DTensor) for parameter in new):
        return 0
    # Of a DTensor these are the figures of the whole.
    return sum(parameter.numel() * parameter.element_size() for parameter in new)
