"""Inventory host names that the fleet's file composes: checks that they are valid and unique."""

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

#: The alias of a host of this plugin, in its `ansible_ssh_common_args`.
_ALIAS = re.compile(r"HostKeyAlias=(tpu-\d*-w\d+)")


def problem(name: Any, groups: Collection[str], hosts: Collection[str] = ()) -> str:
    """Return why the result of a template cannot be a host name; empty if it can.

    Args:
        name: The result: a text, or a number that becomes one.
        groups: Names of groups, which a host must not share.
        hosts: Names of hosts of other sources, which this host must not replace.
    """
    if isinstance(name, bool) or not isinstance(name, str | int):
        return f"a value of type {type(name).__name__} is not a name"
    text = str(name)
    if text in _RESERVED:
        return f"{text!r} has a special meaning for Ansible"
    if text in groups:
        return f"{text!r} is a group"
    if text in hosts:
        return f"{text!r} is a host of another source"
    if not _FORM.fullmatch(text) and not forms.address(text):
        return f"{shortened(text)} is not valid as a host's name"
    return ""


def refuse_another(name: str, worker: Worker, variables: Mapping[str, Any], file: Any) -> None:
    """Reject a host name that another fleet's file gives to another worker: one would hide the other.

    Args:
        name: The host name.
        worker: The worker that gets the name.
        variables: Variables of the existing host of that name, perhaps with those of other sources.
        file: The worker's fleet's file, for the error.

    Raises:
        UsageError: The existing host is another worker; the text names both.
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
        fix="list the projects and zones of both in one file, or rename one with `hostnames`",
    )


class Taken:
    """The inventory host names in use, and their workers.

    Args:
        where: The key of the fleet's file that composes the names, for the error.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._workers: dict[str, str] = {}

    def add(self, name: str, worker: str) -> None:
        """Assign a name to a worker.

        Raises:
            UsageError: Another worker has the name; the text names both.
        """
        other = self._workers.setdefault(name, worker)
        if other != worker:
            raise UsageError(
                f"workers {other} and {worker} would both be called {name!r}",
                where=self._where,
                fix="add a value that differs, as in `tpu_node_label ~ '-' ~ tpu_worker_index`",
            )
