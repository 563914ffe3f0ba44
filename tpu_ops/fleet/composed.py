"""Groups and expressions of the fleet's file: rejects invalid expressions and changes to built-in groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tpu_ops.errors import UsageError


def check_syntax(expression: str, where: str) -> None:
    """Check the syntax of an expression, without evaluating its variables and filters.

    Args:
        expression: The expression, without braces.
        where: The expression's place in the fleet's file, for the error.

    Raises:
        UsageError: The expression's syntax is invalid.
    """
    from jinja2 import Environment, TemplateSyntaxError
    from jinja2.parser import Parser

    parser = None
    try:
        parser = Parser(Environment(autoescape=True), expression, state="variable")
        parser.parse_expression()
        if not parser.stream.eos:
            parser.fail(f"unexpected {parser.stream.current.value!r}")
    except TemplateSyntaxError as exc:
        raise UsageError(
            f"{expression!r:.80} is not an expression: {exc.message}",
            where=where,
            fix="write the expression without braces, as in tpu_worker_count > 1, and quote texts in it",
        ) from exc
    except RecursionError as exc:
        raise UsageError(f"{expression!r:.80} is nested too deeply", where=where, fix="write it shorter") from exc


class Composed:
    """A proxy of Ansible's inventory for one key of the fleet's file: records the hosts added to built-in groups.

    Args:
        inventory: Ansible's inventory.
        own: The built-in groups with their hosts.
    """

    def __init__(self, inventory: Any, own: Mapping[str, Iterable[str]]) -> None:
        self._inventory = inventory
        self._own = own
        self._added: dict[str, list[str]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inventory, name)

    def add_host(self, host: str, group: str | None = None, port: int | None = None) -> Any:
        """Add a host, and add it to a group if one is given."""
        if group is not None and group in self._own:
            self._added.setdefault(group, []).append(host)
        return self._inventory.add_host(host, group, port)

    def add_child(self, group: str, child: str) -> Any:
        """Add a host or a group to a group."""
        if group in self._own:
            self._added.setdefault(group, []).append(child)
        return self._inventory.add_child(group, child)

    def refuse_merged(self, where: str) -> None:
        """Reject additions to built-in groups: Ansible and the commands would see different hosts in these groups.

        Args:
            where: The file and the key, for the error.

        Raises:
            UsageError: The key adds other hosts to a built-in group.
        """
        for group, children in self._added.items():
            own = set(self._own[group])
            # Hosts that are added directly must be exactly the hosts of the built-in group. A child group can have
            # fewer.
            below = {child for child in children if child not in self._inventory.hosts}
            hosts = {child for child in children if child not in below}
            under = {host.name for child in below for host in self._inventory.groups[child].get_hosts()}
            if (hosts and hosts != own) or not under <= own:
                other = sorted((hosts | under) - own) or sorted(own - hosts)
                raise UsageError(
                    f"this key makes a group {group!r}, but a built-in group has this name and other hosts: "
                    f"{other[0]} is in "
                    "one of them only",
                    where=where,
                    fix="use another prefix or name; docs/inventory.md lists the built-in groups",
                )
