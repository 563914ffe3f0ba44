"""Messages about private keys that ssh ignores silently; OpenSSH itself creates the keys."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from tpu_ops.ssh import identities


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """Where a key may be made."""
    return tmp_path / "a key"


def make(key: Path, passphrase: str = "", *options: str) -> None:
    kind = options or ("-t", "ed25519")
    subprocess.run(["ssh-keygen", "-q", *kind, "-N", passphrase, "-f", key], check=True)


def test_of_a_key_that_ssh_uses_nothing_is_said(key: Path) -> None:
    make(key)
    assert identities.fault(key) == ""
    assert identities.fault(key.with_name("none")) == ""


def test_a_public_key_in_the_place_of_one_that_an_agent_holds_is_no_fault(key: Path) -> None:
    make(key)
    key.write_text(key.with_name(f"{key.name}.pub").read_text())
    assert identities.fault(key) == ""


@pytest.mark.parametrize("options", [(), ("-t", "ecdsa", "-m", "PEM"), ("-t", "rsa", "-m", "PKCS8")])
@pytest.mark.parametrize("agent", [True, False])
def test_a_key_with_a_passphrase_is_for_an_agent(
    key: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], *, agent: bool
) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", "/run/agent" if agent else "")
    make(key, "secret", *options)
    fault = identities.fault(key)
    assert fault.startswith(f"{key} has a passphrase")
    assert f"ssh-add '{key}'" in fault
    assert ("ssh-agent" in fault) is not agent


def test_a_key_that_others_can_read_is_not_used(key: Path) -> None:
    make(key)
    key.chmod(0o640)
    assert identities.fault(key) == f"other users can read {key}, so ssh does not use the key: `chmod 600 '{key}'`"


def test_a_key_in_another_format_than_openssh_is_a_fault(key: Path) -> None:
    key.write_text("PuTTY-User-Key-File-3: ssh-ed25519\n")
    key.chmod(0o600)
    assert identities.fault(key).startswith(f"ssh cannot use {key} (")


def test_an_agent_of_an_earlier_login_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind("agent")
        agent.listen()
        for name in ("", "agent"):
            monkeypatch.setenv("SSH_AUTH_SOCK", name)
            assert identities.agent_fault() == ""
    for name, why in (("agent", "Connection refused"), ("gone", "No such file or directory"), ("a" * 200, "too long")):
        monkeypatch.setenv("SSH_AUTH_SOCK", name)
        fault = identities.agent_fault()
        assert fault.startswith(f"no ssh agent answers at {name} (")
        assert why in fault


def test_without_ssh_keygen_no_fault_is_reported(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(key, "secret")
    monkeypatch.setenv("PATH", str(key.parent))
    assert identities.fault(key) == ""
