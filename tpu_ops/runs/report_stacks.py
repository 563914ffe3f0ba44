"""The stacks that workers keep of a run, as text for its report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tpu_ops import texts as times
from tpu_ops.runs.report_curves import is_number

#: Maximum number of frames of a thread, and of threads and processes of a rank, in a report.
FRAMES, THREADS, PROCESSES = 60, 40, 20


def texts(found: Mapping[int, object]) -> dict[int, str]:
    """Return the stacks of each rank as text, given the data that each worker keeps; ranks without any are left out.

    Numbers of processes are left out, so that ranks at the same place have the same text.
    """
    shown = {rank: _text(data) for rank, data in found.items() if isinstance(data, Mapping)}
    return {rank: text for rank, text in shown.items() if text}


def _text(data: Mapping[str, Any]) -> str:
    at = data.get("at")
    lines = [f"taken at {times.at(at)}"] if isinstance(at, int | float) and is_number(at) else []
    for process in _objects(data.get("processes"), PROCESSES):
        how = f", by {process['source']}" if process.get("source") else ""
        lines.append(f"{process.get('command') or 'process'} (state {process.get('state') or '?'}{how})")
        if process.get("why"):
            lines.append(f"  {process['why']}")
        for thread in _objects(process.get("threads"), THREADS):
            lines.append(f"  thread {thread.get('name') or '?'}{', active' if thread.get('active') else ''}")
            frames = thread.get("frames")
            for frame in frames[:FRAMES] if isinstance(frames, list) else ():
                if isinstance(frame, list) and len(frame) == 3:
                    lines.append(f"    {frame[0]} ({frame[1]}:{frame[2]})" if frame[1] else f"    {frame[0]}")
    if data.get("omitted"):
        lines.append(f"({data['omitted']} more processes)")
    return "\n".join(lines)


def _objects(found: object, most: int) -> Iterable[Mapping[str, Any]]:
    return [one for one in found[:most] if isinstance(one, Mapping)] if isinstance(found, list) else ()
