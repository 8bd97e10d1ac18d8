"""The few names for integers and strings that travel between layers."""

from __future__ import annotations

from typing import NewType, TypeAlias

import numpy as np
import numpy.typing as npt

BlockId = NewType("BlockId", int)
"""`page_id * blocks_per_page + index` of one block in its pool."""

PageId = NewType("PageId", int)
"""Number of a page in its pool."""

RequestId: TypeAlias = str
"""A caller's name for one request; unique among live leases."""

Namespace: TypeAlias = str
"""Root of a prefix tree of its own; nothing is shared across namespaces. `""` is the default one."""

Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]
Float64Array: TypeAlias = npt.NDArray[np.float64]
