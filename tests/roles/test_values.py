"""Plain values of roles' variables are judged before the first change."""

from __future__ import annotations

from zoneinfo import ZoneInfoNotFoundError

import pytest

from roles.facts.filter_plugins import values
from roles.launcher.filter_plugins.launcher import ports_faults


@pytest.mark.parametrize(
    ("size", "units", "right"),
    [
        ("100M", "kMG", True),
        ("1048576", "kMG", True),
        ("1G", "KMGTPE", True),
        ("lots", "kMG", False),
        ("100MB", "kMG", False),
        ("1.5G", "kMG", False),
        ("0", "kMG", False),
        ("100K", "kMG", False),
        ("", "kMG", False),
        ("-1M", "kMG", False),
    ],
)
def test_sizes(size: str, units: str, right: bool) -> None:
    faults = values.size_faults({"base_log_max": size}, units)
    assert [fault.partition(" is not a size")[0] for fault in faults] == ([] if right else [f"base_log_max: '{size}'"])


def test_numbers_have_a_least_and_a_most() -> None:
    assert values.number_faults({"a": 1, "b": 0, "c": -5, "d": 181, "e": 180}, 1, 180) == [
        "b: 0 is too small; give 1 or more",
        "c: -5 is too small; give 1 or more",
        "d: 181 is too large; give 180 or less",
    ]
    assert values.number_faults({"a": 2**31 - 1, "b": 2**31}, 0) == [
        "b: 2147483648 is too large; give 2147483647 or less"
    ]


def test_paths_on_a_worker_start_at_its_root() -> None:
    paths: list[str] = ["/etc/x", "~/x", "/etc/../x", "/a b", ""]
    faults = values.path_faults({"a": "/opt/venvs/a..b", "b": "opt", "c": paths, "d": "/.."})
    assert [fault.partition(" is not an absolute path; ")[0] for fault in faults] == [
        "b: 'opt'",
        "c[1]: '~/x'",
        "c[2]: '/etc/../x'",
        "c[3]: '/a b'",
        "c[4]: ''",
        "d: '/..'",
    ]
    assert values.path_faults({"a": "", "b": "opt"}, "a", "b") == values.path_faults({"b": "opt"}) != []


def test_packages_are_named_as_debian_names_them() -> None:
    right = ["g++", "libc6", "python3.12-venv", "libc6:i386", "curl=8.5.0-2ubuntu10", "curl:amd64=1:2~rc1", "nvidia=5*"]
    wrong = ["bad name!", "Bad Pkg", "-y", "x", "curl=", ""]
    faults = values.package_faults(right + wrong, "base_packages")
    assert [fault.partition(" is not a package name")[0] for fault in faults] == [
        f"base_packages[{position}]: '{name}'" for position, name in enumerate(wrong, len(right))
    ]


def test_packages_are_known_by_their_names_whatever_version_is_asked_for() -> None:
    asked = ["zsh", "tmux=3.2a-4", "g++:amd64", "curl:amd64=1:2~rc1", "python3.12-venv"]
    assert values.package_names(asked) == ["zsh", "tmux", "g++", "curl", "python3.12-venv"]


def test_servers_are_one_name_or_address_each() -> None:
    names = ["time.example.org", "10.0.0.2", "2001:db8::1", "fe80::1%eth0", "a b", "", "a;b"]
    assert [fault.partition(":")[0] for fault in values.server_faults(names, "x")] == ["x[4]", "x[5]", "x[6]"]


def test_mirrors_and_indexes_are_addresses() -> None:
    right = {
        "http://a.example/ubuntu": "https://m.example/u",
        "file:/srv/a": "file:/srv/b",
        "cdrom:[Debian 13 _Trixie_ - amd64]/": "HTTPS://m.example/u",
    }
    indexes = {"index": "https://index.test/simple", "none": "", "local": "/srv/simple", "capitals": "HTTP://i.test/"}
    assert values.address_faults(indexes | {"mirrors": right}, "local") == []
    wrong = {
        "http://a.example": "",
        "b.example": "https://m.example",
        "http://c.example x": "https://m.example",
        "http://d.example": "http://e.example http://f.example",
        "http://g.example http://h.example": "http://i.example",
        "http://j.example": "/srv/mirror",
        "http://k.example": "cdrom:[Debian 13]/",
    }
    lists = {
        "index": "ada:s3cret@index.test/simple",
        "url": "http://a b",
        "two": "https://a/simple https://b/simple",
        "local": "/srv/simple",
    }
    faults = values.address_faults(lists | {"mirrors": wrong})
    assert [fault.partition(": must be a URL")[0] for fault in faults] == [
        "index",
        "url",
        "two",
        "local",
        *(f"mirrors: {old}" for old in wrong),
    ]
    assert "s3cret" not in "".join(faults)


@pytest.mark.parametrize(
    ("name", "known", "right"),
    [
        ("", None, True),
        ("Etc/UTC", ["Etc/UTC", "US/Pacific"], True),
        ("Europe/Atlantis", ["Etc/UTC", "US/Pacific"], False),
        # A machine without tzdata, or without its older names.
        ("Europe/Atlantis", [], True),
        ("Asia/Calcutta", ["Etc/UTC"], True),
        ("Mars/Olympus", [], False),
        ("../etc/passwd", [], False),
        ("UTC", [], True),
        ("utc please", [], False),
    ],
)
def test_time_zones_are_judged_as_far_as_they_are_known(
    monkeypatch: pytest.MonkeyPatch, name: str, known: list[str] | None, right: bool
) -> None:
    def zone(name: str) -> None:
        if name not in (known or []):
            raise ZoneInfoNotFoundError(name)

    monkeypatch.setattr(values, "ZoneInfo", zone)
    faults = values.zone_faults(name, "base_timezone")
    said = f"base_timezone: there is no time zone '{name}'; `timedatectl list-timezones` lists them"
    assert faults == ([] if right else [said])


@pytest.mark.parametrize(
    ("remote", "right"),
    [
        ("", True),
        ("https://github.com/ohmyzsh/ohmyzsh.git", True),
        ("http://mirror:8080/omz", True),
        ("git://127.0.0.1/oh-my-zsh.git", True),
        ("ssh://git@forge.test:2222/~tools/omz.git", True),
        ("git@github.com:ohmyzsh/ohmyzsh.git", True),
        ("https://mirror/", True),
        ("forge:omz", True),
        ("forge:/srv/omz", True),
        # Hosts of an ssh config.
        ("git:omz", True),
        ("ssh:omz", True),
        ("git@git:/srv/omz", True),
        ("git@[::1]:/srv/omz", True),
        ("file:///srv/my omz", True),
        ("/srv/my omz", True),
        ("github.com/ohmyzsh/ohmyzsh", False),
        ("ohmyzsh/ohmyzsh", False),
        ("https:/github.com/ohmyzsh/ohmyzsh", False),
        ("git:/github.com/ohmyzsh/ohmyzsh", False),
        # git looks for a program git-remote-HTTPS.
        ("HTTPS://github.com/ohmyzsh/ohmyzsh", False),
        ("https://github.com", False),
        ("htps://github.com/ohmyzsh/ohmyzsh", False),
        ("ext::sh -c x", False),
        ("https://github.com/a b", False),
    ],
)
def test_remotes_that_git_cannot_clone(remote: str, right: bool) -> None:
    said = "is not of the form https://host/path, ssh://user@host/path, user@host:path or /path"
    assert values.remote_faults({"shell_oh_my_zsh_url": remote}) == [f"shell_oh_my_zsh_url: {said}"] * (not right)


@pytest.mark.parametrize(
    ("ports", "said"),
    [
        ([8500, 8519], None),
        ([1024, 1024], None),
        ([9000, 8000], "the first port, 9000, is above the last, 8000; swap them"),
        ([80, 90], "80 to 90 is not within 1024 to 32767; choose a range within these"),
        ([32000, 40000], "32000 to 40000 is not within 1024 to 32767"),
        ([8480, 8500], "8480 to 8500 includes 8480, 8481, 8482"),
        ([8000, 8100], "8000 to 8100 includes 8080, which TPU software uses; omit these"),
        ([8500], "must be two numbers, the first port and the last"),
    ],
)
def test_ports_of_runs(ports: list[int], said: str | None) -> None:
    faults = ports_faults(ports)
    assert len(faults) == bool(said)
    assert all(fault.startswith(f"launcher_ports: {said}") for fault in faults)
