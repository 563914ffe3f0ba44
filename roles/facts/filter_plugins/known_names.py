"""Filters that return a worker's present and future accounts, groups and packages, and the paths in variables.

No effects, so that their tests are tables.

`ANY` in a result stands for the names of a directory service, which answers for single names but lists none.
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
    """Return the people of users_people who belong on a worker, as the role users does (`people_here`)."""
    nodes, groups = set(place["nodes"]), set(place["groups"])

    def here(person: dict[str, Any]) -> bool:
        named, in_groups = person.get("nodes") or [], person.get("groups_of_nodes") or []
        return not (named or in_groups) or bool(nodes & set(named)) or bool(groups & set(in_groups))

    return [person for person in people if here(person)]


def _present(people: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the people of users_people who have or get an account."""
    return [person for person in people if person.get("state", "present") == "present"]


def _accounts(worker: dict[str, Any], here: list[dict[str, Any]]) -> set[str]:
    coming = {str(person.get("name")) for person in _present(here)}
    return ({*worker["accounts"]} - {str(person.get("name")) for person in here}) | coming


def _any(worker: dict[str, Any], kind: str) -> set[str]:
    return {ANY} if kind in worker["unlisted"] else set()


def known_accounts(worker: dict[str, Any], people: list[dict[str, Any]], place: dict[str, Any]) -> list[str]:
    """Return the accounts that a worker has once site.yml has run.

    Args:
        worker: ansible_facts['worker'].
        people: users_people and users_more_people.
        place: `nodes`, the names that the worker's node has, and `groups`, the inventory's groups that it is in.
    """
    return sorted(_accounts(worker, _here(people, place)) | _any(worker, "accounts"))


def accounts_elsewhere(people: list[dict[str, Any]], place: dict[str, Any]) -> list[str]:
    """Return the listed people who have an account on other nodes only; takes the arguments of `known_accounts`."""
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
        worker: As `known_accounts` takes it, like the next two.
        people: The people who may be in groups.
        place: The worker, as in `known_accounts`.
        listed: users_groups.
        brought: Groups that roles create, whoever is in them.
    """
    here = _here(people, place)
    named = {group for person in _present(here) for group in person.get("groups", [])}
    named |= {str(group.get("name")) for group in listed}
    return sorted({*worker["groups"], *named, *_accounts(worker, here), *brought} | _any(worker, "groups"))


def packages_to_come(names: list[str], installed: Mapping[str, str]) -> list[str]:
    """Given packages that roles install, with :ARCHITECTURE or =VERSION if given, return the names of missing ones.

    A package of another version counts as missing; the worker's state does not say of which architecture a package is.

    Args:
        names: As base_packages and shell_packages list them.
        installed: Packages that the worker has, with their versions.
    """
    return sorted({re.split("[:=]", name)[0] for name in names if not _installed(name, installed)})


def _installed(listed: str, installed: Mapping[str, str]) -> bool:
    package, pinned, version = listed.partition("=")
    found = installed.get(package.partition(":")[0])
    # As apt takes versions: with * for any part of one.
    return found is not None and (not pinned or fnmatch.fnmatchcase(found, version))


@accept_args_markers  # type: ignore[untyped-decorator] # Ansible ships no types
def named_paths(people: Any, more_people: Any, paths: Any) -> list[str]:
    """Return the absolute paths in variables that the worker is asked about.

    The worker's state is read before the variables are checked and errors in them are reported: here a missing or
    faulty value names nothing.

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
    except Exception:  # Whatever a template raises, its author has to fix it.
        return []


def _readable(values: Any) -> list[Any]:
    """Return the values of a list whose templates have no error."""
    found = []
    for position in range(len(values)):
        with contextlib.suppress(Exception):  # Whatever a template raises, its author has to fix it.
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
        }
