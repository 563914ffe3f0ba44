"""Which rows of a data set a process reads: every process takes its own, and all take equally many."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def rows_of_process(total: int, index: int, count: int) -> npt.NDArray[np.int64]:
    """Given `total` rows, return the row numbers of process `index` of `count`: disjoint, and equally many each."""
    return np.arange(index, total - total % count, count)
