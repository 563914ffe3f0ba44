"""OpenSSH's command lines and options, read by OpenSSH itself, and messages for its errors."""

from __future__ import annotations

import asyncio
import shlex
import subprocess
from pathlib import Path

import pytest

from tpu_ops.ssh import openssh
from tpu_ops.ssh.masters import PROXIES, Masters, Unreachable

#: What OpenSSH 9.2 and gcloud 528 print, by what happened.
BANNER = "@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\nIT IS POSSIBLE THAT SOMEONE ...\n"
FAILED = "Host key verification failed.\n"
MANY = "Too many authentication failures"
CUT = "kex_exchange_identification: Connection closed by remote host\nConnection closed by UNKNOWN port 65535\n"
SAID = {
    "no key is known": (
        f"No ED25519 host key is known for tpu-16-w0 and you have requested strict checking.\n{FAILED}",
        ["host key verification failed", "no host key is known", "`tpu_ops refresh`"],
    ),
    "the key has changed": (
        f"{BANNER}Host key for tpu-16-w0 has changed and you have requested strict checking.\n{FAILED}",
        ["a key other than the known one", "`tpu_ops refresh --verify-keys`"],
    ),
    "the jump's key is not known": (
        f"No ED25519 host key is known for bastion.example.org and you have requested strict checking.\n{FAILED}{CUT}",
        ["bastion.example.org", "not known to you", "ssh bastion.example.org"],
    ),
    "the jump's key has changed": (
        f"{BANNER}Host key for bastion has changed and you have requested strict checking.\n{FAILED}{CUT}",
        ["bastion", "not the key that you know"],
    ),
    "a key is wrong in words of another version": (FAILED, ["host key verification failed"]),
    "nothing listens behind the jump": (
        f"channel 0: open failed: connect failed: Connection refused\nstdio forwarding failed\n{CUT}",
        ["connect failed: Connection refused"],
    ),
    "the jump is away": (
        f"ssh: connect to host 198.19.176.99 port 22: No route to host\n{CUT}",
        ["198.19.176.99 port 22: No route to host"],
    ),
    "the jump refuses": (
        f"tpu@198.19.176.8: Permission denied (publickey).\n{CUT}",
        ["198.19.176.8: Permission denied (publickey). (said by the jump, not by the worker)"],
    ),
    "the agent has many keys": (
        f"Received disconnect from 34.0.1.1 port 22:2: {MANY}\nDisconnected from 34.0.1.1 port 22\n",
        [MANY],
    ),
    "the agent has many keys, through a proxy": (
        f"Received disconnect from UNKNOWN port 65535:2: {MANY}\nDisconnected from UNKNOWN port 65535\n",
        [MANY],
    ),
    "nothing answers behind the proxy": (
        "Connection timed out during banner exchange\r\nConnection to UNKNOWN port 65535 timed out\r\n",
        ["Connection timed out during banner exchange"],
    ),
    "gcloud is not installed": (f"/bin/bash: line 1: exec: gcloud: not found\n{CUT}", ["gcloud: not found"]),
    "gcloud is not logged in": (
        f"ERROR: (gcloud.compute) You do not currently have an active account selected.\nPlease run:\n{CUT}",
        ["You do not currently have an active account selected."],
    ),
    "sshd was busy": (CUT.splitlines()[0], ["kex_exchange_identification"]),
    "nothing": ("", ["ssh ended with 255"]),
}


@pytest.mark.parametrize("what", SAID)
def test_an_error_of_ssh_is_summarized_in_one_line(what: str) -> None:
    said, words = SAID[what]
    told = openssh.reason(said, 255)
    assert [word for word in words if word not in told] == []
    assert "\n" not in told
    assert "UNKNOWN port" not in told


def test_too_many_authentication_failures_count_as_a_refusal() -> None:
    said = [f"Received disconnect from {one} port 22:2: {MANY}\nDisconnected from {one} port 22" for one in ("a", "b")]
    (told,) = {openssh.reason(text, 255) for text in said}
    assert openssh.refused(told)
    assert openssh.too_many(told)
    assert not openssh.too_many("ada@a: Permission denied (publickey).")


def test_a_login_refused_by_the_proxy_differs_from_one_by_the_worker() -> None:
    denied = "ada@a: Permission denied (publickey)."
    for words, by_proxy in (("", False), (CUT, True)):
        told = openssh.reason(f"{denied}\n{words}", 255)
        assert openssh.refused(told)
        assert openssh.refused_by_proxy(told) is by_proxy


@pytest.mark.parametrize("name", ["plain", "a b", "100%", "it's", 'q"q', "back\\slash", "\\", "a#b", "%h %C", "ü"])
def test_ssh_reads_a_quoted_path_as_it_was(name: str) -> None:
    path = f"/x/{name}/y"
    options = ["-o", f"UserKnownHostsFile={openssh.quoted(path)}", "-o", f"ControlPath={openssh.quoted(path)}"]
    seen = subprocess.run(["ssh", "-F", "none", *options, "-G", "h"], capture_output=True, text=True, check=True).stdout
    lines = seen.splitlines()
    assert f"controlpath {path}" in lines
    # Where it expands percent signs as late as it connects, it shows them doubled.
    assert {f"userknownhostsfile {path}", f"userknownhostsfile {path.replace('%', '%%')}"} & set(lines), seen


def test_the_shell_of_rsync_is_one_word_list_again() -> None:
    words = shlex.split(openssh.rsync_shell(Path("/state dir/ssh_config")))
    assert words[:3] == ["ssh", "-F", "/state dir/ssh_config"]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Each connection that is opened, with how many are being opened then; `bad` fails."""
    found: list[tuple[str, int]] = []
    open_now = 0

    async def connect(self: Masters, host: str) -> None:
        nonlocal open_now
        open_now += 1
        found.append((host, open_now))
        try:
            for _ in range(20):
                await asyncio.sleep(0)
            if host == "bad":
                raise Unreachable("down")
        finally:
            open_now -= 1

    async def alive(self: Masters, host: str) -> bool:
        return False

    monkeypatch.setattr(Masters, "_open", connect)
    monkeypatch.setattr(Masters, "_alive", alive)
    return found


@pytest.mark.parametrize("first", ["pod-w0", "bad"])
async def test_behind_a_proxy_one_connection_opens_first_and_then_a_few(
    tmp_path: Path, opened: list[tuple[str, int]], first: str
) -> None:
    hosts = [first, *(f"far-w{index}" for index in range(30))]
    masters = Masters(tmp_path / "ssh_config", proxied=hosts)
    await asyncio.gather(*(masters.ensure(host) for host in [*hosts, "near-w0", "near-w1"]), return_exceptions=True)
    assert {host for host, _ in opened[:3]} == {"near-w0", "near-w1", first}
    behind = [count for host, count in opened[3:]]
    assert len(behind) == 30
    assert max(behind) == PROXIES
