"""Masters of addresses that are no longer a worker's are told to end, and none of it can hold a refresh up."""

from __future__ import annotations

import os

import pytest

from tpu_ops.ssh import masters


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """Puts a program in the place of ssh that notes its arguments, and returns where."""
    notes = tmp_path / "notes"
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    hang = f"[ ! -e {tmp_path}/hang ] || {{ sleep 20; echo over >> {notes}; }}"
    program.write_text(f'#!/bin/sh\necho "$*" >> {notes}\n{hang}\nexit 255\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return notes


@pytest.fixture
def mux(tmp_path):
    """A directory with a control socket in it."""
    path = tmp_path / "mux"
    path.mkdir()
    (path / "socket").touch()
    return path


def test_the_master_of_each_address_is_told_to_exit(ssh, mux):
    masters.end_left(
        [("34.0.0.2", f"{mux}/b"), ("34.0.0.1", f"{mux}/a"), ("34.0.0.1", f"{mux}/a")], user="ada", mux=mux
    )
    assert sorted(ssh.read_text().splitlines()) == [
        f"-F none -o BatchMode=yes -o ControlPath={mux}/{name} -l ada -O exit {address}"
        for address, name in (("34.0.0.1", "a"), ("34.0.0.2", "b"))
    ]


def test_nothing_is_started_where_there_is_no_master(ssh, mux):
    (mux / "socket").unlink()
    masters.end_left([("34.0.0.1", "socket")], user="ada", mux=mux)
    masters.end_left([("34.0.0.1", "socket")], user="ada", mux=mux / "nowhere")
    assert not ssh.exists()


def test_a_hanging_master_holds_nothing_up(ssh, mux, tmp_path, monkeypatch):
    (tmp_path / "hang").touch()
    monkeypatch.setattr(masters, "_EXIT_LIMIT", 1.0)
    masters.end_left([("34.0.0.1", "socket")], user="ada", mux=mux)
    assert len(ssh.read_text().splitlines()) == 1
