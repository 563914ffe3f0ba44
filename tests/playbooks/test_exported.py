"""The parts of a shell's environment that Ansible gets: the fleet's inventories alone, and a locale that it accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpu_ops.ansible import exported
from tpu_ops.errors import UsageError


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a fleet, what stands beside its file, and the inventories of other machines; it is the cwd."""
    for name in ("fleet/inventory/tpu_vm.yml", "fleet/inventory/more.yml", "fleet/inventory/b.tpu_vm.yml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "many").mkdir()
    for name in ("many/a.tpu_vm.yml", "many/servers.yml", "servers.yml"):
        (tmp_path / name).touch()
    (tmp_path / "link.yml").symlink_to("fleet/inventory/tpu_vm.yml")
    (tmp_path / "linked").symlink_to("fleet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WHERE", str(tmp_path))
    return tmp_path


FLEET, OF_MANY = "fleet/inventory/tpu_vm.yml", "many/a.tpu_vm.yml"


@pytest.mark.parametrize(
    ("own", "given", "whole"),
    [
        (FLEET, "", []),
        (FLEET, " ,", []),
        (FLEET, "{}/fleet/inventory/tpu_vm.yml", ["{}/fleet/inventory/tpu_vm.yml"]),
        # As `lab env` has it, and tools/example.py.
        (FLEET, "{}/fleet/inventory/tpu_vm.yml,/lab.yml", ["{}/fleet/inventory/tpu_vm.yml", "/lab.yml"]),
        (FLEET, "servers.yml, fleet/inventory", ["{}/servers.yml", "{}/fleet/inventory"]),
        (FLEET, "$WHERE/fleet/inventory/", ["{}/fleet/inventory"]),
        (FLEET, "link.yml", ["{}/link.yml"]),
        (FLEET, "linked/inventory/more.yml", ["{}/linked/inventory/more.yml"]),
        (OF_MANY, "many", ["{}/many"]),
        (OF_MANY, "many/../many/a.tpu_vm.yml", ["{}/many/../many/a.tpu_vm.yml"]),
    ],
)
def test_the_shells_inventories_are_used_if_they_contain_the_fleet(
    place: Path, own: str, given: str, whole: list[str]
) -> None:
    found = exported.inventories(place / own, {exported.VARIABLE: given.format(place)})
    assert found == [path.format(place) for path in whole]


@pytest.mark.parametrize(
    ("own", "given"),
    [
        (FLEET, "servers.yml"),
        (FLEET, "{}/servers.yml,many"),
        (FLEET, "fleet"),
        (FLEET, "localhost,"),
        (FLEET, "fleet/inventory/b.tpu_vm.yml"),
        (OF_MANY, "many/servers.yml"),
        (OF_MANY, FLEET),
    ],
)
def test_inventories_of_other_machines_are_refused(place: Path, own: str, given: str) -> None:
    given = given.format(place)
    with pytest.raises(UsageError) as caught:
        exported.inventories(place / own, {exported.VARIABLE: given})
    assert given in caught.value.where
    assert str(place / own) in caught.value.where
    assert "`unset ANSIBLE_INVENTORY`" in caught.value.fix
    assert "--fleet" in caught.value.fix


@pytest.mark.parametrize(
    ("variables", "taken"),
    [
        ({}, None),
        ({"LANG": "C"}, None),
        ({"LANG": "C.UTF-8", "LC_TIME": "C"}, None),
        ({"LC_ALL": "C"}, "C.UTF-8"),
        ({"LC_ALL": "POSIX", "LANG": "C.UTF-8"}, "C.UTF-8"),
        ({"LC_ALL": "xx_XX.UTF-8"}, "C.UTF-8"),
        ({"LANG": "xx_XX"}, "C.UTF-8"),
        ({"LANG": "C.UTF-8", "LC_TIME": "xx_XX.UTF-8"}, "C.UTF-8"),
    ],
    ids=str,
)
def test_a_locale_that_ansible_refuses_is_replaced_and_no_other(variables: dict[str, str], taken: str | None) -> None:
    environ = {"HOME": "/", **variables}
    assert exported.with_utf8(environ) == environ | ({"LC_ALL": taken} if taken else {})
