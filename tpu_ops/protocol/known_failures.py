"""Names failures of a program by known texts in the last lines of its output.

A launcher stores which failure it found, and a controller words it. Each text is one that XLA, libtpu, Python or a
library prints; the comment above it names the source.
"""

from __future__ import annotations

from . import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Dict, Tuple

#: The program ran out of the chips' memory, or of the worker's memory; other processes hold the chips; workers of the
#: slice are missing.
HBM, HOST_MEMORY, IN_USE, TOPOLOGY = "hbm", "host-memory", "chips-in-use", "topology"
#: Kind of a failure -> regular expressions, of which one has to match in a line.
TEXTS: Dict[str, Tuple[str, ...]] = {
    HBM: (
        # openxla/xla, docs/errors/error_1000.md: HBM is full at compile time.
        r"Ran out of memory in memory space hbm",
        r"\bHbm usage:? .{1,80}exceeding available bytes",
        # openxla/xla, docs/errors/error_0100.md and error_0101.md: no room for a buffer, or for a compiled program.
        r"Attempting to (allocate|reserve) .{1,80}That was not possible",
    ),
    HOST_MEMORY: (
        # Python's exception without or with a text, and that of numpy (numpy/_core/_exceptions.py).
        r"(\b|(?<=\._Array))MemoryError(:|$)",
        # PyTorch, c10/core/impl/alloc_cpu.cpp.
        r"DefaultCPUAllocator: (can't|not enough memory)",
        # What libstdc++ prints when a C++ program does not handle the exception.
        r"terminate called after throwing an instance of 'std::bad_alloc'",
        # ENOMEM of Linux, as Python prints it: usually a fork without memory.
        r"\[Errno 12\] Cannot allocate memory",
    ),
    IN_USE: (
        # openxla/xla, xla/stream_executor/tpu/tpu_initialize_util.cc, TryAcquireTpuLock: by a pid, by another user,
        # or with a lockfile that cannot be opened.
        r"The TPU is already in use",
        r"Internal error when accessing libtpu multi-process lockfile",
        # The same function until 2022: jax-ml/jax#10192, pytorch/xla#3214.
        r"libtpu\.so (is )?already in used? by",
        # Chips by VFIO: marin-community/marin#2618, google/gvisor#11545.
        r"open\(/dev/vfio/\d+\): Device or resource busy",
        # Chips of v4 and older, whose driver answers EPERM while another process has them open: pytorch/xla#3883 and
        # #3947, jax-ml/jax#13260.
        r"(open\(|open device: )/dev/accel\d+\)?:? ?\(?(Operation not permitted|Device or resource busy)",
    ),
    TOPOLOGY: (
        # pytorch/xla#7939 and google/gemma_pytorch#25: a slice of several workers, not all of which take part.
        r"Failed to get global TPU topology",
    ),
}
#: Number of bytes of output that are searched. XLA lists the largest allocations after the line that names HBM.
SEARCHED = 32 * 1024
#: Number of characters of a line that are searched and stored.
_LINE = 500


def find(text: str) -> Dict[str, str] | None:
    """Return the ``kind`` of the last known failure in a text, and the ``line`` that names it; else None."""
    import re  # imported late, since it is only needed at the end of a rank

    lines = "\n".join(line[:_LINE].strip() for line in text.splitlines())
    # Search all lines at once: a search for each of thousands of short lines would take a second.
    found = [
        (match.start(), kind)
        for kind, patterns in TEXTS.items()
        for match in re.finditer("|".join(patterns), lines, re.MULTILINE)
    ]
    if not found:
        return None
    at, kind = max(found)
    first, end = lines.rfind("\n", 0, at + 1) + 1, lines.find("\n", at + 1)
    return {"kind": kind, "line": lines[first : end if end >= 0 else None]}


def of_cause(cause: str) -> Dict[str, str] | None:
    """Return the failure that the cause of a rank's end names itself; None if it names none."""
    # `cause_of` in host/rank_record.py appends this if the kernel has killed a process of the rank.
    return {"kind": HOST_MEMORY, "line": ""} if cause.endswith(": out of memory") else None
