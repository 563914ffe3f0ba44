from __future__ import annotations

import fnmatch
import hashlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.facts.system.distribution import Distribution

from playbooks.filter_plugins import slices
from roles.base.filter_plugins.base import CLOCKS
from roles.facts.library import worker_facts
from roles.facts.module_utils import unit_settings
from roles.facts.module_utils.mount_points import UNITS
from roles.nfs.filter_plugins.nfs_plan import SERVICES

Run = Callable[..., dict[str, Any]]

ROLES = Path(worker_facts.__file__).parents[2]
UBUNTU = """PRETTY_NAME="Ubuntu 22.04.4 LTS"
NAME="Ubuntu"
VERSION_ID="22.04"
VERSION_CODENAME=jammy
ID=ubuntu
ID_LIKE=debian
"""
DEBIAN = """PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"
NAME="Debian GNU/Linux"
VERSION_ID="12"
VERSION_CODENAME=bookworm
ID=debian
"""


@pytest.mark.parametrize(
    ("os_release", "debian_version", "found"),
    [
        (UBUNTU, "bookworm/sid\n", ("Ubuntu", "22.04", "22", "jammy")),
        (DEBIAN, "12.11\n", ("Debian", "12.11", "12", "bookworm")),
        (DEBIAN, "trixie/sid\n", ("Debian", "12", "12", "bookworm")),
        ("", "", ("", "", "", "")),
    ],
)
def test_the_distribution_is_read_from_its_own_files(
    os_release: str, debian_version: str, found: tuple[str, ...]
) -> None:
    assert tuple(worker_facts.distribution(os_release, debian_version).values()) == found


def test_facts_have_the_values_of_ansible_s_setup(run: Run) -> None:
    facts = run(worker_facts, {})["ansible_facts"]

    class Module:
        """What the collector asks of a module."""

        @staticmethod
        def run_command(*_: Any, **__: Any) -> tuple[int, str, str]:
            return 1, "", ""

    setup = Distribution(module=Module()).get_distribution_facts()
    names = ["distribution", "distribution_version", "distribution_major_version", "distribution_release"]
    assert {name: facts[name] for name in names} == {name: setup[name] for name in names}


def test_only_installed_packages_are_listed() -> None:
    listing = "installed\ttmux\t3.3a-3\nconfig-files\tzsh\t5.9\nhalf-installed\tmosh\t1.4\nnot-installed\tx\t\n"
    assert worker_facts.packages(listing) == {"tmux": "3.3a-3"}


def test_units_are_known_by_file_and_by_what_is_loaded() -> None:
    files = "ssh.service enabled enabled\ngetty@.service enabled enabled\nold.timer masked\n"
    loaded = (
        "ssh.service loaded active running OpenBSD Secure Shell server\ngetty@tty1.service loaded failed failed x\n"
    )
    assert worker_facts.units(files, loaded + "gone.service not-found inactive dead gone.service\n") == {
        "ssh.service": {"enabled": "enabled", "active": "active"},
        "getty@.service": {"enabled": "enabled", "active": "inactive"},
        "old.timer": {"enabled": "masked", "active": "inactive"},
        "getty@tty1.service": {"enabled": "", "active": "failed"},
    }


def test_mounts_have_their_names_and_both_kinds_of_options() -> None:
    line = r"41 25 8:17 / /mnt/my\040data ro,noatime shared:9 - ext4 /dev/sdb1 rw,discard"
    assert worker_facts.mounts(line + "\n") == [
        {"source": "/dev/sdb1", "target": "/mnt/my data", "fstype": "ext4", "options": "ro,noatime,discard"}
    ]


@pytest.mark.parametrize(
    ("names", "stamped", "filled", "fresh"),
    [
        (["x_main_binary_Packages.lz4"], 0, True, True),
        ([], 0, False, True),
        # Where nothing was fetched, and where fetching failed since: apt has touched its own directories only.
        (["x_Packages"], None, True, False),
        (["x_Packages"], 30 * 86400, True, False),
    ],
)
def test_the_age_of_package_lists_is_that_of_the_last_complete_refresh(
    tmp_path: Path, names: list[str], stamped: int | None, filled: bool, fresh: bool
) -> None:
    stamp, lists = tmp_path / "stamp", tmp_path / "lists"
    (lists / "partial").mkdir(parents=True)
    for name in names:
        (lists / name).touch()
    if stamped is not None:
        stamp.touch()
        os.utime(stamp, (time.time() - stamped,) * 2)
    found = worker_facts.apt_lists(str(lists), str(stamp))
    assert (found["filled"], found["age"] < 60, found["stamp"]) == (filled, fresh, str(stamp))


@pytest.mark.parametrize(("names", "interrupted"), [([], False), (["tmp.i"], False), (["0000", "tmp.i"], True)])
def test_dpkg_was_cut_short_where_apt_says_so(tmp_path: Path, names: list[str], interrupted: bool) -> None:
    """By the files that apt looks for (apt-pkg/deb/debsystem.cc, CheckUpdates)."""
    for name in names:
        (tmp_path / name).touch()
    assert worker_facts.dpkg_interrupted(str(tmp_path)) is interrupted
    assert worker_facts.dpkg_interrupted(str(tmp_path / "none")) is False


def test_programs_say_their_versions_and_those_that_do_not_run_are_left_out(run: Run, tmp_path: Path) -> None:
    (tmp_path / "uv").write_text("#!/bin/sh\necho uv 1.2\necho more\n")
    (tmp_path / "uv").chmod(0o755)
    (tmp_path / "broken").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "broken").chmod(0o755)
    asked = [str(tmp_path / name) for name in ("uv", "broken", "none")]
    worker = run(worker_facts, {"programs": asked, "files": asked})["ansible_facts"]["worker"]
    assert worker["programs"] == {str(tmp_path / "uv"): "uv 1.2"}
    assert [entry.get("state") for entry in worker["files"].values()] == ["file", "file", None]
    assert worker["accounts"]["root"]["home"] == "/root"
    assert any(mount["target"] == "/proc" for mount in worker["mounts"])


def test_paths_are_missing_executable_or_merely_there(run: Run, tmp_path: Path) -> None:
    (tmp_path / "library").touch()
    (tmp_path / "shell").symlink_to("/bin/sh")
    (tmp_path / "dangling").symlink_to("nowhere")
    asked = {name: str(tmp_path / name) for name in ("library", "shell", "dangling", ".")}
    found = run(worker_facts, {"paths": [*asked.values()], "skip_done": False})["ansible_facts"]["worker"]["paths"]
    assert {name: found[path] for name, path in asked.items()} == {
        "library": "there",
        "shell": "executable",
        "dangling": "missing",
        ".": "there",
    }


def test_facts_hold_content_and_rights_of_files_if_done_work_is_skipped(run: Run, tmp_path: Path) -> None:
    own = {"owner": tmp_path.owner(), "group": tmp_path.group()}
    (tmp_path / "d" / "e").mkdir(parents=True, mode=0o700)
    (tmp_path / "d" / "e" / "a").write_bytes(b"\xff\n# BEGIN tpu_ops\nx\n# END tpu_ops\n")
    (tmp_path / "d" / "e" / "a").chmod(0o4640)
    (tmp_path / "d" / "link").symlink_to("nowhere")
    os.mkfifo(tmp_path / "d" / "pipe")
    patterns = [str(tmp_path / "d" / "**"), str(tmp_path / "d" / "link" / "a"), str(tmp_path / "n*")]
    found = worker_facts.entries(patterns)
    digests = [hashlib.sha256(data).hexdigest() for data in ((tmp_path / "d" / "e" / "a").read_bytes(), b"x")]
    assert {str(Path(path).relative_to(tmp_path)): state for path, state in found.items()} == {
        "d": own | {"state": "directory", "mode": "0755"},
        "d/e": own | {"state": "directory", "mode": "0700"},
        "d/e/a": own | {"state": "file", "mode": "4640", "digest": digests[0], "block": digests[1]},
        "d/link": {"state": "link", "target": "nowhere"},
        "d/link/a": {},
        "d/pipe": own | {"state": "other", "mode": "0644"},
    }
    facts = run(worker_facts, {"files": patterns, "skip_done": False})["ansible_facts"]
    assert facts["worker"]["files"] == {}


def test_units_with_unmet_conditions_differ_from_stopped_ones() -> None:
    shown = """Id=a.service
ConditionResult=no
ConditionTimestamp=Sat 2026-11-21 12:00:00 UTC

Id=never-tried.service
ConditionResult=no
ConditionTimestamp=

Id=stopped.service
ConditionResult=yes
ConditionTimestamp=Sat 2026-11-21 12:00:00 UTC
"""
    assert worker_facts.refused(shown) == ["a.service"]


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    """Return a file of a service's settings, written ten seconds ago in a directory that is older."""
    path = tmp_path / "journald.conf.d" / "zz-tpu_ops.conf"
    path.parent.mkdir()
    path.touch()
    for place, ago in ((path, 10), (path.parent, 20)):
        os.utime(place, (time.time() - ago,) * 2)
    return path


def shown(*, started: float, active: str = "active", reload: str = "no", load: str = "loaded") -> str:
    """Return what systemctl says of a service that was started some seconds ago, and of another unit."""
    moment = int((time.monotonic() - started) * 1e6)
    return f"""NeedDaemonReload={reload}
ExecMainStartTimestampMonotonic={moment}
Id=journald.service
ActiveState={active}
LoadState={load}

NeedDaemonReload=no
LoadState=loaded
Id=other.timer
ActiveState=active
"""


@pytest.mark.parametrize(
    ("started", "active", "late"), [(15, "active", True), (5, "active", False), (15, "inactive", False)]
)
def test_a_service_older_than_its_settings_needs_a_restart(
    settings: Path, started: float, active: str, late: bool
) -> None:
    units = {"journald.service": str(settings), "other.timer": f"{UNITS}/other.timer.d/tpu_ops.conf"}
    assert unit_settings.behind(units, shown(started=started, active=active)) == ["journald.service"] * late


def test_settings_that_were_removed_after_the_start_or_are_of_a_time_to_come(settings: Path) -> None:
    units = {"journald.service": str(settings), "other.timer": ""}
    os.utime(settings, (time.time() + 3600,) * 2)
    assert unit_settings.behind(units, shown(started=15)) == []
    settings.unlink()
    assert unit_settings.behind(units, shown(started=15)) == ["journald.service"]
    settings.parent.rmdir()
    assert unit_settings.behind(units, shown(started=15)) == []


def test_a_unit_whose_part_systemd_has_not_read_is_behind() -> None:
    units = {"journald.service": f"{UNITS}/journald.service.d/tpu_ops.conf", "other.timer": ""}
    assert unit_settings.behind(units, shown(started=15, reload="yes")) == ["journald.service"]
    assert unit_settings.behind(units, shown(started=15, reload="yes", load="masked")) == []
    assert unit_settings.behind(units, shown(started=15)) == []


def test_the_settings_that_are_looked_at_are_those_that_roles_write() -> None:
    settings = yaml.safe_load((ROLES / "facts" / "defaults" / "main.yml").read_text())["facts_settings"]
    kept = "".join(path.read_text() for path in ROLES.glob("*/vars/main.yml"))
    assert [path for path in settings.values() if f"path: {path}\n" not in kept] == []


@pytest.mark.parametrize(
    ("nsswitch", "unlisted"),
    [
        ("", []),
        ("passwd: files systemd\ngroup:\tcompat [NOTFOUND=return] files\nshadow: ldap\n", []),
        ("#passwd: sss\npasswd: files systemd sss # more\ngroup: files\n", ["accounts"]),
        ("passwd: files [SUCCESS=merge] cache_oslogin oslogin\ngroup: files winbind", ["accounts", "groups"]),
    ],
)
def test_a_directory_service_may_have_more_accounts_than_are_listed(nsswitch: str, unlisted: list[str]) -> None:
    assert worker_facts.unlisted(nsswitch) == unlisted


@pytest.mark.parametrize(("line", "choice"), [("always [madvise] never\n", "madvise"), ("", "")])
def test_the_kernel_s_choice_of_hugepages_stands_in_brackets(line: str, choice: str) -> None:
    assert worker_facts.hugepages(line) == choice


def test_the_files_that_roles_keep_are_read(tmp_path: Path) -> None:
    patterns = yaml.safe_load((ROLES / "facts" / "defaults" / "main.yml").read_text())["facts_files"]
    kept = {
        path
        for file in ROLES.glob("*/vars/main.yml")
        for path in re.findall(r"^ *(?:-|__\w+:)(?: {)? path: (/[\w./-]+)", file.read_text(), re.MULTILINE)
    }
    for path in kept:
        (tmp_path / path[1:]).mkdir(parents=True, exist_ok=True)
    found = worker_facts.entries([f"{tmp_path}{pattern}" for pattern in patterns])
    assert [path for path in kept if f"{tmp_path}{path}" not in found] == []
    assert len(kept) > 15


def test_words_are_found_in_files_and_unreadable_files_count_as_matching(run: Run, tmp_path: Path) -> None:
    for name, text in (("a.sh", "export LD_PRELOAD=/x/libtcmalloc.so.4\n"), ("b.sh", "LD_PRELOAD=other\n")):
        (tmp_path / name).write_text(text)
    (tmp_path / "c.sh").mkdir()
    asked = {"mentions": {"libtcmalloc": [str(tmp_path / "*.sh"), str(tmp_path / "none")], "none": []}}
    worker = run(worker_facts, asked)["ansible_facts"]["worker"]
    assert worker["mentions"] == {"libtcmalloc": [str(tmp_path / "a.sh")], "none": []}
    assert run(worker_facts, asked | {"skip_done": False})["ansible_facts"]["worker"]["mentions"] == {}


def test_the_units_that_roles_and_playbooks_decide_by_are_read() -> None:
    patterns = yaml.safe_load((ROLES / "facts" / "defaults" / "main.yml").read_text())["facts_units"]
    sources = [path for place in (ROLES, ROLES.parent / "playbooks") for path in place.rglob("*.yml")]
    named = {name for path in sources for name in re.findall(r"\['units'\]\['([\w.-]+)'\]", path.read_text())}
    named |= {*CLOCKS.values(), *SERVICES.values(), slices.RUN, "srv-data.mount", "mnt-shared.automount"}
    assert named >= {"logrotate.timer", "fstrim.timer"}
    assert [name for name in sorted(named) if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)] == []
