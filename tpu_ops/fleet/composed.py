"""Groups and expressions of the fleet's file: what no expression is, and groups that would merge into built-in ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tpu_ops.errors import UsageError


def check_syntax(expression: str, where: str) -> None:
    """Check that a text is an expression, whatever the variables and filters in it.

    Args:
        expression: Without braces.
        where: Where it is written, for an error.

    Raises:
        UsageError: It is none.
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
            fix="write it without braces, as in tpu_worker_count > 1, with quotes around texts in it",
        ) from exc
    except RecursionError as exc:
        raise UsageError(f"{expression!r:.80} is nested too deeply", where=where, fix="write it shorter") from exc


class Composed:
    """Ansible's inventory as one key of the fleet's file fills it: keeps what that key puts into built-in groups.

    Args:
        inventory: Ansible's.
        own: The built-in groups with their hosts.
    """

    def __init__(self, inventory: Any, own: Mapping[str, Iterable[str]]) -> None:
        self._inventory = inventory
        self._own = own
        self._added: dict[str, list[str]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inventory, name)

    def add_host(self, host: str, group: str | None = None, port: int | None = None) -> Any:
        """Add a host, to a group where one is named."""
        if group is not None and group in self._own:
            self._added.setdefault(group, []).append(host)
        return self._inventory.add_host(host, group, port)

    def add_child(self, group: str, child: str) -> Any:
        """Add a host or a group to a group."""
        if group in self._own:
            self._added.setdefault(group, []).append(child)
        return self._inventory.add_child(group, child)

    def refuse_merged(self, where: str) -> None:
        """Refuse what would make a built-in group another one to Ansible than it is to the commands.

        Args:
            where: The file and the key, for an error.

        Raises:
            UsageError: The key makes a group of a built-in one's name that has other hosts, or adds some to one.
        """
        for group, children in self._added.items():
            own = set(self._own[group])
            # A group below a built-in one may be a part of it.
            below = {child for child in children if child not in self._inventory.hosts}
            hosts = {child for child in children if child not in below}
            under = {host.name for child in below for host in self._inventory.groups[child].get_hosts()}
            if (hosts and hosts != own) or not under <= own:
                other = sorted((hosts | under) - own) or sorted(own - hosts)
                raise UsageError(
                    f"it makes a group {group!r}, which is a built-in group with other hosts: {other[0]} is in one "
                    "of them only",
                    where=where,
                    fix="use another prefix or name; docs/inventory.md lists the built-in groups",
                )
