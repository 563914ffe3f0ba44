"""What the guest agent makes of metadata."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpu_ops.lab.image import guest_agent

KEY = "ssh-ed25519 AAAAC3Nza"


@pytest.mark.parametrize(
    ("text", "users"),
    [
        ("", {}),
        (f"tpu:{KEY} tpu@host", {"tpu": [f"{KEY} tpu@host"]}),
        (f"tpu:{KEY}\n\ntpu:ssh-rsa BBBB x\n", {"tpu": [KEY, "ssh-rsa BBBB x"]}),
        (f"tpu:{KEY}\ntpu:{KEY}", {"tpu": [KEY]}),
        (f"ada:{KEY} a\n  bob:{KEY} b  ", {"ada": [f"{KEY} a"], "bob": [f"{KEY} b"]}),
        (f"no colon\nroot:{KEY}\n-x:{KEY}\nA B:{KEY}\n../x:{KEY}\ntpu:\ntpu:onlytype", {}),
    ],
)
def test_ssh_keys_lines(text: str, users: dict[str, list[str]]) -> None:
    assert guest_agent.parse_ssh_keys(text, 0) == users


@pytest.mark.parametrize(
    ("until", "now", "kept"),
    [
        ("2026-01-01T00:00:00+0000", 1767225599, True),
        ("2026-01-01T00:00:00+0000", 1767225600, False),
        ("2026-01-01T02:00:00+0200", 1767225599, True),
        ("2026-01-01T00:00:00Z", 1767225600, False),
        ("soon", 0, False),
    ],
)
def test_a_key_that_google_gave_an_end_ends(until: str, now: float, kept: bool) -> None:
    line = f'tpu:{KEY} google-ssh {{"userName":"tpu","expireOn":"{until}"}}'
    assert bool(guest_agent.parse_ssh_keys(line, now)) is kept


@pytest.mark.parametrize(
    ("before", "keys", "after"),
    [
        ("", ["k1"], "# Added by Google\nk1\n"),
        ("mine\n", ["k1", "k2"], "mine\n# Added by Google\nk1\n# Added by Google\nk2\n"),
        ("# Added by Google\nold\nmine\n", ["new"], "mine\n# Added by Google\nnew\n"),
        ("# note\nmine\n# Added by Google\nold\n", [], "# note\nmine\n"),
        ("mine\n# Added by Google", ["k1"], "mine\n# Added by Google\nk1\n"),
    ],
)
def test_the_agent_rewrites_only_its_own_lines(before: str, keys: list[str], after: str) -> None:
    assert guest_agent.with_own_block(before, keys) == after
    assert guest_agent.with_own_block(after, keys) == after


def test_workers_names_mean_internal_addresses_only() -> None:
    hosts = {"t1v-w-0": "10.0.0.9", "t1v-w-1": "10.0.0.10"}
    before = "127.0.0.1\tlocalhost\n198.18.0.9\tt1v-w-0\n10.0.0.9\tt1v-w-0 # own\n10.0.0.5\tt1v-w-01\n"
    after = "127.0.0.1\tlocalhost\n10.0.0.5\tt1v-w-01\n10.0.0.9\tt1v-w-0\n10.0.0.10\tt1v-w-1\n"
    assert guest_agent.with_names(before, hosts) == after
    assert guest_agent.with_names(after, hosts) == after
    # What others write is left where it is.
    assert guest_agent.with_names(f"{after}10.0.0.9 forge\n", hosts) == f"{after}10.0.0.9 forge\n"


def test_each_port_of_the_labs_storage_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, program = tmp_path / "log", tmp_path / "systemctl"
    program.write_text(f'#!/bin/sh\necho "$@" >>{log}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    sockets, opened = tmp_path / "storage", list[str]()
    guest_agent.open_storage(sockets, opened)  # the directory does not exist on workers of an older lab
    sockets.mkdir()
    for port in ("18471", "40001"):
        (sockets / f"{port}.sock").touch()
        assert guest_agent.open_storage(sockets, opened)
        assert not guest_agent.open_storage(sockets, opened)
    assert opened == ["18471", "40001"]
    assert log.read_text().splitlines() == [
        "start tpu-lab-storage@18471.socket",
        "start tpu-lab-storage@40001.socket",
    ]
