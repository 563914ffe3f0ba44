"""Groups with a number that is the same on all workers."""

from __future__ import annotations

from typing import Any

import pytest

from roles.users.filter_plugins.groups import group_faults, people_groups

RESEARCH = {"name": "research", "gid": 5000}
GIDS = {"root": 0, "systemd-network": 998, "ada": 1001, "old": 5007}
CHANGE = "nobody works in it: groupmod --gid 5000 research, and find / -xdev -gid 997 -exec chgrp -h research {} +"
ACCOUNTS: dict[str, Any] = {"root": {}, "ada": {}, "backup": {}}


def person(name: str, *groups: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "groups": list(groups), "state": "present", **fields}


@pytest.mark.parametrize(
    ("people", "listed", "there", "made"),
    [
        ([], [], [], []),
        ([person("ada", "video", "tpu-run")], [], ["video"], [("tpu-run", 0)]),
        ([person("ada", "research", "video")], [RESEARCH], [], [("research", 5000), ("video", 0)]),
        # Files may belong to a group that nobody is in.
        ([person("ada", "vision", state="absent")], [RESEARCH], [], [("research", 5000)]),
        ([person("ada", "research")], [RESEARCH], ["research"], []),
    ],
)
def test_groups_are_made_with_their_numbers(
    people: list[dict[str, Any]], listed: list[dict[str, Any]], there: list[str], made: list[tuple[str, int]]
) -> None:
    assert [(group["name"], group["gid"]) for group in people_groups(people, listed, there)] == made


@pytest.mark.parametrize(
    ("group", "gids", "fault"),
    [
        ({}, {}, None),
        ({}, {"research": 5000}, None),
        ({"gid": 100}, {}, None),
        ({"name": "R&D"}, {}, "R&D: name must be a group name other than root"),
        ({"name": "sudo"}, {}, "name must be a group name other than root, sudo,"),
        ({"name": "tpu-run"}, {}, "and tpu-run; use at most"),
        ({"name": "bea"}, {}, "bea: the name is that of a listed person"),
        ({"name": "backup"}, {}, "backup: the name is that of an account on this worker"),
        ({"gid": 99}, {}, "gid must be a number from 100 to 59999, not 99"),
        ({"gid": 60000}, {}, "gid must be a number from 100 to 59999, not 60000"),
        ({"gid": 998}, {}, "gid: 998 belongs to the group systemd-network on this worker; choose another"),
        ({"gid": 5001}, {}, "gid 5001 is the uid of bea in users_people[0], whose own group gets this number"),
        (
            {},
            {"research": 997},
            f"group has gid 997 on this worker, users_groups says 5000; list 997, or change the group while {CHANGE}",
        ),
    ],
)
def test_a_group_that_cannot_have_its_number_is_refused(
    group: dict[str, Any], gids: dict[str, int], fault: str | None
) -> None:
    lists = {"users_people": [person("bea", uid=5001)], "users_more_people": []}
    found = group_faults([RESEARCH | group], lists, GIDS | gids, ACCOUNTS)
    assert len(found) == (fault is not None)
    assert (fault or "") in "".join(found)
    assert all(line.startswith("users_groups[0]: ") for line in found)


@pytest.mark.parametrize(
    ("second", "fault"),
    [
        ({"name": "research", "gid": 5002}, "research: listed twice, first as users_groups[0]"),
        (
            {"name": "vision", "gid": 5000},
            "vision: gid 5000 is already the gid of research; give each group a different gid",
        ),
        ({"name": "vision", "gid": 5002}, None),
    ],
)
def test_each_group_has_one_number_of_its_own(second: dict[str, Any], fault: str | None) -> None:
    found = group_faults([RESEARCH, second], {}, GIDS, ACCOUNTS)
    assert [line.partition(": ")[0] for line in found] == (["users_groups[1]"] if fault else [])
    assert (fault or "") in "".join(found)
