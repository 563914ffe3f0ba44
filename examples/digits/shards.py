"""Which rows of a data set a process reads: every process has its own, and all have the same number."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def rows_of_process(total: int, index: int, count: int) -> npt.NDArray[np.int64]:
    """Return the row numbers of process `index` of `count`, out of `total` rows: disjoint, and equally many each."""
    return np.arange(index, total - total % count, count)
