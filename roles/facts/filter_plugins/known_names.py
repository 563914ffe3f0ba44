"""Filters that tell which accounts and groups a worker has or gets; no effects, so that their tests are tables."""

from __future__ import annotations

from typing import Any


def _present(people: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return those of users_people who have an account."""
    return [person for person in people if person.get("state", "present") == "present"]


def known_accounts(worker: dict[str, Any], people: list[dict[str, Any]]) -> list[str]:
    """Given ansible_facts['worker'] and users_people, return the accounts that there are once site.yml has run."""
    leaving = {person.get("name") for person in people} - {person.get("name") for person in _present(people)}
    return sorted({*worker["accounts"], *(str(person.get("name")) for person in _present(people))} - leaving)


def known_groups(worker: dict[str, Any], people: list[dict[str, Any]]) -> list[str]:
    """Given ansible_facts['worker'] and users_people, return the groups that there are once site.yml has run."""
    named = {group for person in _present(people) for group in person.get("groups", [])}
    return sorted({*worker["groups"], *named, *known_accounts(worker, people), "tpu-run"})


class FilterModule:
    """Filters for all roles."""

    def filters(self) -> dict[str, Any]:
        """Return the filters by name."""
        return {"known_accounts": known_accounts, "known_groups": known_groups}
