"""Filter that checks the launcher's ports; no side effects, so that its tests are tables."""

from __future__ import annotations

#: Unprivileged ports, below the range from which the kernel assigns ports.
PORTS = range(1024, 32768)
#: libtpu's own ports, and the one of Megascale.
TAKEN = (8080, 8431, *range(8470, 8491))


def ports_faults(ports: list[int]) -> list[str]:
    """Given launcher_ports, return what is wrong with them, as a list of none or one."""
    if len(ports) != 2:
        return ["launcher_ports: must be two numbers, the first port and the last"]
    first, last = map(int, ports)
    if first > last:
        return [f"launcher_ports: the first port, {first}, is above the last, {last}; swap them"]
    if first not in PORTS or last not in PORTS:
        return [f"launcher_ports: {first} to {last} is not within {PORTS[0]} to {PORTS[-1]}; choose a range that is"]
    if taken := [str(port) for port in TAKEN if first <= port <= last]:
        return [
            f"launcher_ports: {first} to {last} includes {', '.join(taken)}, which TPU software uses; choose others"
        ]
    return []


class FilterModule:
    """Filter of the role launcher."""

    def filters(self) -> dict[str, object]:
        """Return the filter by name."""
        return {"ports_faults": ports_faults}
