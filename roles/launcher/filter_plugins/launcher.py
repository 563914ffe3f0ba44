"""Filter that checks the launcher's ports; no side effects, so that its tests are tables."""

from __future__ import annotations

from tpu_ops.protocol.spec import RUN_PORTS, TAKEN_PORTS


def ports_faults(ports: list[int]) -> list[str]:
    """Return the fault of launcher_ports as a list of one message; empty if there is none."""
    if len(ports) != 2:
        return ["launcher_ports: must be two numbers, the first port and the last"]
    first, last = map(int, ports)
    if first > last:
        return [f"launcher_ports: the first port, {first}, is above the last, {last}; swap them"]
    if first not in RUN_PORTS or last not in RUN_PORTS:
        within = f"{RUN_PORTS[0]} to {RUN_PORTS[-1]}"
        return [f"launcher_ports: {first} to {last} is not within {within}; choose a range within these"]
    if taken := [str(port) for port in TAKEN_PORTS if first <= port <= last]:
        return [f"launcher_ports: {first} to {last} includes {', '.join(taken)}, which TPU software uses; omit these"]
    return []


class FilterModule:
    """Filter of the role launcher."""

    def filters(self) -> dict[str, object]:
        """Return the filter by name."""
        return {"ports_faults": ports_faults}
