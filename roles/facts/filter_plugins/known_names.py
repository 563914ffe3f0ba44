"""Filters that return the accounts, groups and packages that a worker has or will get, and the paths in variables.

The filters have no side effects, so that their tests are tables.

A result contains `ANY` if the worker uses a directory service, which answers for single names but may list none: then
every name may exist.
"""

from __future__ import annotations

import contextlib
import fnmatch
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ansible.template import accept_args_markers

ANY = "*"


def _here(people: list[dict[str, Any]], place: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the people of users_people who belong on a worker, by the same rules as the filter `people_here`."""
    nodes, groups = set(place["nodes"]), set(place["groups"])

    def here(person: dict[str, Any]) -> bool:
        named, in_groups = person.get("nodes") or [], person.get("groups_of_nodes") or []
        return not (named or in_groups) or bool(nodes & set(named)) or bool(groups & set(in_groups))

    return [person for person in people if here(person)]


def _present(people: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the people of users_people who have or will get an account."""
    return [person for person in people if person.get("state", "present") == "present"]


def _accounts(worker: dict[str, Any], here: list[dict[str, Any]]) -> set[str]:
    coming = {str(person.get("name")) for person in _present(here)}
    return ({*worker["accounts"]} - {str(person.get("name")) for person in here}) | coming


def _any(worker: dict[str, Any], kind: str) -> set[str]:
    return {ANY} if kind in worker["unlisted"] else set()


def people_with_accounts(people: list[dict[str, Any]], place: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the listed people who have an account on a worker once site.yml has run, as in `known_accounts`."""
    return _present(_here(people, place))


def known_accounts(worker: dict[str, Any], people: list[dict[str, Any]], place: dict[str, Any]) -> list[str]:
    """Return the accounts that a worker has once site.yml has run.

    Args:
        worker: The worker's facts, ansible_facts['worker'].
        people: The entries of users_people and users_more_people.
        place: `nodes`, all names of the worker's node, and `groups`, the inventory's groups that contain the worker.
    """
    return sorted(_accounts(worker, _here(people, place)) | _any(worker, "accounts"))


def accounts_elsewhere(people: list[dict[str, Any]], place: dict[str, Any]) -> list[str]:
    """Return the listed people who have an account on other nodes only; arguments as in `known_accounts`."""
    here = {str(person.get("name")) for person in _present(_here(people, place))}
    return sorted({str(person.get("name")) for person in _present(people)} - here)


def known_groups(
    worker: dict[str, Any],
    people: list[dict[str, Any]],
    place: dict[str, Any],
    listed: Iterable[dict[str, Any]] = (),
    brought: Iterable[str] = (),
) -> list[str]:
    """Return the groups that a worker has once site.yml has run.

    Args:
        worker: The worker's facts, ansible_facts['worker'].
        people: The entries of users_people and users_more_people.
        place: As in `known_accounts`.
        listed: users_groups.
        brought: Groups that other roles create.
    """
    here = _here(people, place)
    named = {group for person in _present(here) for group in person.get("groups", [])}
    named |= {str(group.get("name")) for group in listed}
    return sorted({*worker["groups"], *named, *_accounts(worker, here), *brought} | _any(worker, "groups"))


def packages_to_come(names: list[str], installed: Mapping[str, str]) -> list[str]:
    """Given packages that roles install, return the names of those that the worker does not have yet.

    A package with another version than the listed one counts as missing. The architecture is not compared, since the
    worker's facts do not contain it.

    Args:
        names: Names as in base_packages and shell_packages, optionally with :ARCHITECTURE and =VERSION.
        installed: Packages that the worker has, with their versions.
    """
    return sorted({re.split("[:=]", name)[0] for name in names if not _installed(name, installed)})


def _installed(listed: str, installed: Mapping[str, str]) -> bool:
    package, pinned, version = listed.partition("=")
    found = installed.get(package.partition(":")[0])
    # As in apt's syntax, a version can contain * for any text.
    return found is not None and (not pinned or fnmatch.fnmatchcase(found, version))


@accept_args_markers  # type: ignore[untyped-decorator] # Ansible ships no types
def named_paths(people: Any, more_people: Any, paths: Any) -> list[str]:
    """Return the absolute paths in some variables, about which the module worker_facts is to report.

    The module runs before the variables are checked, so missing and invalid values are ignored here and reported later.

    Args:
        people: users_people.
        more_people: users_more_people.
        paths: Values of variables that are paths.
    """
    named = {path for path in (*_shells(people), *_shells(more_people), *_readable(paths)) if isinstance(path, str)}
    return sorted(path for path in named if path.startswith("/"))


def _shells(people: Any) -> list[Any]:
    """Return the login shells of people; none if the list cannot be read."""
    try:
        return [person["shell"] for person in people if "shell" in person]
    except Exception:  # The check of the variables reports the error of this template later.
        return []


def _readable(values: Any) -> list[Any]:
    """Return the values of a list, without those whose templates raise an error."""
    found = []
    for position in range(len(values)):
        with contextlib.suppress(Exception):  # The check of the variables reports the error of this template later.
            found.append(values[position])
    return found


class FilterModule:
    """Filters for all roles."""

    def filters(self) -> dict[str, Any]:
        """Return the filters by name."""
        return {
            "accounts_elsewhere": accounts_elsewhere,
            "known_accounts": known_accounts,
            "known_groups": known_groups,
            "named_paths": named_paths,
            "packages_to_come": packages_to_come,
            "people_with_accounts": people_with_accounts,
        }
