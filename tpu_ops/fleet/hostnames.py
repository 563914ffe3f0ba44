"""Checks that the inventory host names composed by the key `hostnames` of the fleet's file are valid and unique."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from tpu_ops.cloud import forms
from tpu_ops.cloud.node import Worker
from tpu_ops.errors import UsageError
from tpu_ops.fleet.targets import shortened

_FORM = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")

#: Names with a special meaning for Ansible.
_RESERVED = ("all", "ungrouped", "localhost", "127.0.0.1", "::1")

#: The alias of a worker in the variable `ansible_ssh_common_args` that the inventory plugin sets.
_ALIAS = re.compile(r"HostKeyAlias=(tpu-\d*-w\d+)")


def problem(name: Any, groups: Collection[str], hosts: Collection[str] = ()) -> str:
    """Return why the result of a template cannot be a host name; empty if it can.

    Args:
        name: The result of the template. A number is converted to a text.
        groups: Names of groups: a host must not have the same name.
        hosts: Names of hosts of other inventories: this host must not replace them.
    """
    if isinstance(name, bool) or not isinstance(name, str | int):
        return f"a value of type {type(name).__name__} is not a name"
    text = str(name)
    if text in _RESERVED:
        return f"{text!r} has a special meaning for Ansible"
    if text in groups:
        return f"{text!r} is a group"
    if text in hosts:
        return f"{text!r} is a host of another inventory source"
    if not _FORM.fullmatch(text) and not forms.address(text):
        return f"{shortened(text)} is not valid as a host's name"
    return ""


def refuse_another(name: str, worker: Worker, variables: Mapping[str, Any], file: Any) -> None:
    """Reject a host name that another fleet's file gives to another worker: one worker would hide the other.

    Args:
        name: The host name.
        worker: The worker that gets the name.
        variables: Variables of the existing host of that name, from any inventory source.
        file: The fleet's file that lists the worker, for the error.

    Raises:
        UsageError: The existing host is another worker; the error names both workers.
    """
    found = _ALIAS.search(str(variables.get("ansible_ssh_common_args", "")))
    if not found or found[1] == worker.host_key_alias:
        return
    node = [variables.get(f"tpu_{part}") for part in ("project", "zone", "node", "worker_index")]
    other = found[1] if None in node else "worker {3} of projects/{0}/locations/{1}/nodes/{2}".format(*node)
    raise UsageError(
        f"worker {worker.index} of {worker.node.full_name} and {other}, of another fleet's file, "
        f"would both be called {name!r}",
        where=str(file),
        fix="list the projects and zones of both fleets in one file, or set other host names with the key `hostnames`",
    )


class Taken:
    """The inventory host names in use, each with its worker.

    Args:
        where: The key of the fleet's file that composes the names, for the error.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._workers: dict[str, str] = {}

    def add(self, name: str, worker: str) -> None:
        """Assign a name to a worker.

        Raises:
            UsageError: Another worker has the name already; the error names both workers.
        """
        other = self._workers.setdefault(name, worker)
        if other != worker:
            raise UsageError(
                f"workers {other} and {worker} would both be called {name!r}",
                where=self._where,
                fix="add a value that differs, as in `tpu_node_label ~ '-' ~ tpu_worker_index`",
            )
