"""Compare what two runs made, bit by bit: tensors, numbers, and whatever contains them.

A value is taken apart first (`taking_apart.py`, with `tensors.py` for tensors and arrays): every number, text
and tensor in it gets a name such as `result['loss']`; containers are remembered by type (`kinds.py`). Then
the parts are compared by name (`matching.py`). Bits decide: 0.0 is not -0.0, and float32 is not float64. Only
NaN has many bit patterns for one thing: NaN equals NaN, and nothing else. What cannot be taken apart, such as
an object of an unknown class, is not called equal: it is listed as not compared.
"""

from trainfit.comparing.matching import Different, Match, compare, largest_element
from trainfit.comparing.taking_apart import Contents, contents_of

__all__ = ["Contents", "Different", "Match", "compare", "contents_of", "largest_element"]
