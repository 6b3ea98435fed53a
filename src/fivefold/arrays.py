"""Types of what is computed for one layout, or for many at once."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]

Elementwise: TypeAlias = Any
"""A number or truth value, for one layout, or an array [n] of them, for n layouts.

The same arithmetic serves both. A union of the two would be wrong in every expression, because the
operands of one expression are all of one layout or all of n; a type parameter cannot follow numpy's
own result types."""
