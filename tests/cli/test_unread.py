"""Results without a reader, as in `tpu_ops run ... | head -0`: the exit code and the hints are kept."""

from __future__ import annotations

import sys

import pytest

from tests.support.nodes import key
from tpu_ops.cli import options
from tpu_ops.errors import ExitCode
from tpu_ops.fleet import first_contact
from tpu_ops.fleet.first_contact import Answer
from tpu_ops.runs import doctor
from tpu_ops.runs.doctor import Finding
from tpu_ops.runs.preflight import Fault
from tpu_ops.ssh import known_hosts
from tpu_ops.ssh.replies import Result


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_run_ends_as_the_command_did_and_shows_what_it_said(fleet, tpu_ops, unread, monkeypatch, more):
    fleet.create("pod", "v4-16")
    results = {
        "pod-w0": Result("pod-w0", 7, stdout=b"out", stderr=b"first\n", cut=True),
        "pod-w1": Result("pod-w1", None, stderr=b"second\n", problem="Permission denied (publickey)", reached=False),
    }
    monkeypatch.setattr("tpu_ops.cli.run.contact.run", lambda *_: results)
    unread()
    code, _, err = tpu_ops("run", "pod", *more, "--exit-code", "rank", "--", "true")
    assert code == 7
    assert "pod-w0: the output was cut after" in err
    assert "  fix: you logged in as ada" in err
    assert more or {"first", "second"} <= set(err.splitlines())


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_doctor_ends_as_what_it_found(fleet, tpu_ops, unread, monkeypatch, more):
    fleet.create("pod", "v4-16")

    async def found(*_):
        fault = Fault("pod-w0", "it is full", "free some")
        return [Finding("state", (fault,), ("pod-w0", "pod-w1")), Finding("answers", (), ("pod-w0", "pod-w1"))]

    monkeypatch.setattr(doctor, "examine", found)
    unread()
    assert tpu_ops("doctor", "pod", *more)[0] == ExitCode.FAILED


@pytest.mark.parametrize("more", [(), ("--json",)])
@pytest.mark.usefixtures("play")
def test_host_keys_that_could_not_be_compared_are_told(fleet, tpu_ops, unread, more):
    fleet.create("pod", "v4-16")
    tpu_ops("refresh")
    fleet.api.fault(project=fleet.project, method="GetGuestAttributes", code="PERMISSION_DENIED", message="denied")
    unread()
    code, _, err = tpu_ops("refresh", "--verify-keys", *more)
    fleet.api.clear_faults()
    assert code == ExitCode.CLOUD
    assert "the host keys of 2 of 2 workers could not be compared" in err


@pytest.mark.parametrize("ended", [(1, "and none was trusted"), (0, "recorded in")])
def test_nobody_is_asked_to_trust_what_cannot_be_seen(fleet, tpu_ops, unread, monkeypatch, ended):
    code, words = ended
    more = () if code else ("--yes",)
    fleet.create("pod", "v4-16")
    monkeypatch.setattr(first_contact, "ask", lambda *args: [Answer(one, "ssh-ed25519", key("a")) for one in args[2]])
    monkeypatch.setattr(options, "confirmed", lambda *_: pytest.fail("somebody was asked"))
    fleet.api.fault(project=fleet.project, method="GetGuestAttributes", code="NOT_FOUND", message="disabled")
    unread()
    done = tpu_ops("refresh", "--trust-first", "pod", *more)
    fleet.api.clear_faults()
    assert done[0] == code, done[2]
    assert words in done[2]
    file = fleet.settings().state_dir / "known_hosts"
    assert len(known_hosts.trusted_first(file.read_text())) == 2 * bool(more)


def test_a_result_alone_that_nobody_reads_is_no_error(fleet, tpu_ops, unread):
    unread()
    assert tpu_ops("list")[0] == ExitCode.OK
    assert sys.stdout.closed is False
