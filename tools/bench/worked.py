"""The processor time of a lab's workers, whatever else runs on this machine: what the kernel counts for containers."""

from __future__ import annotations

from pathlib import Path

from tpu_ops.lab import engine
from tpu_ops.lab.networks import LABEL

_CGROUPS = Path("/sys/fs/cgroup")
_NANO, _MICRO = 1e9, 1e6


def worked(instance: str) -> float:
    """Return the processor time of the containers of a lab since their start, in seconds.

    Raises:
        OpsError: The container engine failed.
        OSError: The kernel does not count it.
    """
    found = engine.find()
    containers = found.call("ps", "--quiet", "--filter", f"label={LABEL}={instance}").stdout.split()
    pids = found.call("inspect", "--format", "{{.State.Pid}}", *containers).stdout.split() if containers else []
    return sum(of(Path(f"/proc/{pid}/cgroup").read_text()) for pid in pids)


def of(text: str, root: Path = _CGROUPS) -> float:
    """Return the processor time of a container in seconds, given /proc/PID/cgroup of its first process.

    Args:
        text: Lines with number, controllers and path of each hierarchy. The hierarchy of version 2 has no controllers.
        root: Where the hierarchies are mounted.
    """
    places: dict[str, str] = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        # The first process is systemd, which has a group of its own below that of the container.
        own = path.removesuffix("/init.scope").lstrip("/")
        places |= dict.fromkeys(controllers.split(","), own)
    if "cpuacct" in places:
        return int((root / "cpuacct" / places["cpuacct"] / "cpuacct.usage").read_text()) / _NANO
    (line,) = [
        line for line in (root / places[""] / "cpu.stat").read_text().splitlines() if line.startswith("usage_usec ")
    ]
    return int(line.split()[1]) / _MICRO
