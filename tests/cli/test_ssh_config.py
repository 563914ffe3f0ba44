"""`tpu_ops ssh-config`: what it prints, where it writes, and what it warns of."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.support.commands import failed
from tpu_ops.ssh import openssh


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    """The ssh config of this person, in a home of the test's own."""
    monkeypatch.setattr(openssh, "home", lambda: tmp_path / "home")
    return tmp_path / "home" / ".ssh" / "config"


@pytest.fixture
def fragment(fleet):
    """The fleet's ssh config."""
    fleet.create("pod", "v4-16")
    return fleet.settings().state_dir / "ssh_config"


def test_without_options_it_prints_the_path_and_says_how_to_use_it(fragment, tpu_ops):
    code, out, err = tpu_ops("ssh-config")
    assert (code, out) == (0, f"{fragment}\n")
    assert f"ssh -F {fragment}" in err
    assert f'Include "{fragment}"' in err
    assert not fragment.exists()
    assert json.loads(tpu_ops("ssh-config", "--json")[1]) == {"ssh_config": str(fragment)}


def test_print_shows_the_text_of_the_ssh_config(fragment, tpu_ops):
    code, out, _ = tpu_ops("ssh-config", "--print")
    assert (code, out) == (0, fragment.read_text())
    assert "HostKeyAlias" in out
    assert json.loads(tpu_ops("ssh-config", "--print", "--json")[1])["text"] == out


def test_a_name_with_the_end_of_a_line_in_it_is_printed_in_one(fragment, tmp_path, tpu_ops):
    assert tpu_ops("ssh-config", "--install", "--dry-run", "--file", f"{tmp_path}/a\nb")[1] == (
        f"{tmp_path}/a b: would be installed\n"
    )


def test_a_person_installs_and_uninstalls_it(fragment, own, tpu_ops):
    own.parent.mkdir(exist_ok=True)
    own.write_bytes(b"Host *\n    User eve")
    assert tpu_ops("ssh-config", "--install", "--dry-run") == (0, f"{own}: would be installed\n", "")
    assert own.read_bytes() == b"Host *\n    User eve"
    assert tpu_ops("ssh-config", "--install") == (0, f"{own}: installed\n", "")
    assert own.read_bytes() == b'Include "%s"\nHost *\n    User eve' % str(fragment).encode()
    seen = subprocess.run(["ssh", "-F", own, "-G", "pod-w1"], capture_output=True, text=True, check=True).stdout
    assert "user ada" in seen.splitlines()
    assert tpu_ops("ssh-config", "--install") == (0, f"{own}: already there\n", "")
    assert tpu_ops("refresh")[1].endswith("\nssh HOST\n")
    told = json.loads(tpu_ops("ssh-config", "--uninstall", "--dry-run", "--json")[1])
    expected = {"file": str(own), "ssh_config": str(fragment), "outcome": "removed", "dry_run": True, "warnings": []}
    assert told == expected
    assert tpu_ops("ssh-config", "--uninstall") == (0, f"{own}: removed\n", "")
    assert own.read_bytes() == b"Host *\n    User eve"
    assert tpu_ops("ssh-config", "--uninstall") == (0, f"{own}: not there\n", "")
    own.write_text(f'Host pod-*\n    Include "{fragment}"\n')
    assert tpu_ops("refresh")[1].endswith(f"\nssh -F {fragment} HOST\n")


def test_a_home_other_than_the_one_ssh_uses_is_reported(fragment, own, tpu_ops, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "elsewhere"))
    code, _, err = tpu_ops("ssh-config", "--install")
    assert code == 0
    assert f"ssh uses {own.parent.parent}" in err
    assert own.exists()
    assert not (tmp_path / "elsewhere").exists()


def test_another_file_can_be_named(fragment, own, tpu_ops, fleet):
    assert tpu_ops("ssh-config", "--install", "--file", "mine")[1] == f"{fleet.path / 'mine'}: installed\n"
    assert (fleet.path / "mine").exists()
    assert not own.exists()


def test_a_file_can_be_named_below_a_home(fragment, tpu_ops, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    path = tmp_path / "home" / "x" / "cfg"
    assert tpu_ops("ssh-config", "--install", "--file=~/x/cfg")[1] == f"{path}: installed\n"
    assert path.exists()
    failed(tpu_ops("ssh-config", "--install", "--file=~nobodyhere/cfg"), 2, "--file")


def test_a_configuration_that_ssh_refuses_is_an_error(fragment, own, tpu_ops):
    own.parent.mkdir(exist_ok=True)
    own.write_text("Nonsense yes\n")
    code, out, err = tpu_ops("ssh-config", "--install")
    assert code == 1
    assert "installed" in out
    assert "ssh does not find pod-w0" in err
    assert "nonsense" in err.lower()


def test_an_empty_fleet_can_be_installed_before_it_has_nodes(fleet, own, tpu_ops):
    assert tpu_ops("ssh-config", "--install")[0] == 0
    assert own.exists()


@pytest.mark.parametrize("argv", [("--dry-run",), ("--file", "x"), ("--print", "--dry-run")])
def test_options_that_change_nothing_here_are_refused(fleet, tpu_ops, argv):
    failed(tpu_ops("ssh-config", *argv), 2, "--install or --uninstall")
