"""Filters that tell which accounts and groups a worker has or gets; no effects, so that their tests are tables.

`ANY` among them stands for whatever a directory service has: it answers for a name and lists none.
"""

from __future__ import annotations

from typing import Any

ANY = "*"


def _here(people: list[dict[str, Any]], place: dict[str, Any]) -> list[dict[str, Any]]:
    """Return those of users_people who belong on a worker, as the role users does (`people_here`)."""
    nodes, groups = set(place["nodes"]), set(place["groups"])

    def here(person: dict[str, Any]) -> bool:
        named, in_groups = person.get("nodes") or [], person.get("groups_of_nodes") or []
        return not (named or in_groups) or bool(nodes & set(named)) or bool(groups & set(in_groups))

    return [person for person in people if here(person)]


def _present(people: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return those of users_people who have an account."""
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


def known_groups(worker: dict[str, Any], people: list[dict[str, Any]], place: dict[str, Any]) -> list[str]:
    """Return the groups that a worker has once site.yml has run, from what `known_accounts` takes."""
    here = _here(people, place)
    named = {group for person in _present(here) for group in person.get("groups", [])}
    return sorted({*worker["groups"], *named, *_accounts(worker, here), "tpu-run"} | _any(worker, "groups"))


class FilterModule:
    """Filters for all roles."""

    def filters(self) -> dict[str, Any]:
        """Return the filters by name."""
        return {"known_accounts": known_accounts, "known_groups": known_groups}
