"""Filters about the fleet's locks: files below inventory/locks that `tpu_ops lock` writes; no side effects."""

from __future__ import annotations

from typing import Any

Words = dict[str, Any]

#: The keys of an environment that say which packages it lists, in the form of the module uv_environments.
LISTED = ("requirements", "constraints", "find_links")


def lock_header(environment: Words, machine: str) -> str:
    """Return the first lines of the fleet's lock of an environment; the lock is valid only for the list in them.

    Args:
        environment: The environment in the form of the module uv_environments.
        machine: The processor architecture of the workers.
    """
    lines = [f"# Lock of {environment['name']}, Python {environment['python_version']}, {machine}: by `tpu_ops lock`"]
    lines += [f"# {key}: {' '.join(str(entry).split())}" for key in LISTED for entry in environment[key]]
    return "\n".join([*lines, "#", ""])


def fleet_lists(wanted: list[Words], machine: str, index: str) -> list[Words]:
    """Return the lists that `tpu_ops lock` resolves: those of environments without a lock file of their own.

    Args:
        wanted: The environments in the form of the module uv_environments.
        machine: The processor architecture of the worker.
        index: URL of the package index; empty means uv's default.
    """
    keys = ("name", "python_version", *LISTED)
    return [
        {key: entry[key] for key in keys} | {"machine": machine, "index": index, "header": lock_header(entry, machine)}
        for entry in wanted
        if not entry["lock"] and entry["requirements"]
    ]


def fleet_locked(wanted: list[Words], machine: str, locks: list[str]) -> list[Words]:
    """Return environments in the form of the module uv_environments, with the fleet's locks of their lists.

    Args:
        wanted: The environments; one that has a lock file of its own keeps it.
        machine: The processor architecture of the worker.
        locks: The texts of the fleet's locks.
    """
    return [entry if entry["lock"] else entry | _locked(entry, machine, locks) for entry in wanted]


def _locked(entry: Words, machine: str, locks: list[str]) -> Words:
    found = [text for text in locks if text.startswith(lock_header(entry, machine))]
    # Packages that an owner other than root added stay, as without a lock.
    exact = entry["owner"] == "root"
    return {"lock": found[0], "exact": exact, "agreed": not exact} if found else {}


def fleet_lock_faults(wanted: list[Words], machine: str, locks: list[str], variable: str = "") -> list[str]:
    """Return a fault for each environment whose list has changed since the fleet's lock was resolved.

    It is no fault if there is no lock for this Python and processor architecture: one worker then resolves the list.

    Args:
        wanted: The environments, as for `fleet_locked`.
        machine: The processor architecture of the worker.
        locks: The texts of the fleet's locks.
        variable: The variable with the list, for messages; empty if the lists are those of python_environments.
    """
    faults = []
    for entry in wanted:
        first, *now = _list_of(lock_header(entry, machine))
        lists = [found for found in map(_list_of, locks) if found[0] == first]
        if entry["lock"] or not lists or _locked(entry, machine, locks):
            continue
        before = min((found[1:] for found in lists), key=lambda lines: len({*lines} ^ {*now}))
        changes = [f"now also {line}" for line in now if line not in before]
        changes += [f"no longer {line}" for line in before if line not in now]
        kind = f"{entry['name']} for Python {entry['python_version']} on {machine}"
        faults.append(
            f"{variable or entry['variable'] + '.requirements'}: the fleet's lock of {kind} is for another list"
            f" ({', '.join(changes) or 'in another order'}); run `tpu_ops lock`, and try again"
        )
    return faults


def _list_of(text: str) -> list[str]:
    """Given a lock of the fleet, return its first line and the entries of its list."""
    first, *lines = text.partition("\n#\n")[0].splitlines() or [""]
    return [first, *(line.removeprefix("# ").removeprefix("requirements: ") for line in lines)]


class FilterModule:
    """Filters about the fleet's locks."""

    def filters(self) -> dict[str, Any]:
        """Return the filters by name."""
        return {
            "fleet_lists": fleet_lists,
            "fleet_locked": fleet_locked,
            "fleet_lock_faults": fleet_lock_faults,
        }
