"""`tpu_ops refresh --trust-first`: what is shown, asked, recorded and refused."""

from __future__ import annotations

import io
import json
import sys

import pytest

from tests.support.commands import failed
from tests.support.nodes import key
from tpu_ops.fleet import first_contact
from tpu_ops.fleet.first_contact import Answer
from tpu_ops.ssh import known_hosts

PRINT = {host: known_hosts.fingerprint(key(host)) for host in ("pod-w0", "pod-w1")}


@pytest.fixture
def pod(fleet):
    """A pod whose guest agents publish nothing; the fleet's known_hosts."""
    fleet.create("pod", "v4-16")
    fleet.api.fault(project=fleet.project, method="GetGuestAttributes", code="NOT_FOUND", message="disabled")
    yield fleet.settings().state_dir / "known_hosts"
    fleet.api.clear_faults()


@pytest.fixture(autouse=True)
def silent(monkeypatch):
    """Workers answer with a key made of their names, but for those in this set; no ssh is started."""
    hosts: set[str] = set()

    def ask(settings, fleet, workers):
        return [
            Answer(worker, problem="Connection refused")
            if worker.host in hosts
            else Answer(worker, "ssh-ed25519", key(worker.host))
            for worker in workers
        ]

    monkeypatch.setattr(first_contact, "ask", ask)
    return hosts


@pytest.fixture
def terminal(monkeypatch):
    """Puts a person at a terminal who answers this."""

    def answer(text: str) -> None:
        stdin = io.StringIO(text)
        stdin.isatty = lambda: True  # type: ignore[method-assign]
        monkeypatch.setattr(sys, "stdin", stdin)

    return answer


def test_create_leads_to_what_a_node_needs_that_publishes_no_keys(fleet, pod, tpu_ops, monkeypatch):
    monkeypatch.setattr("tpu_ops.fleet.view.KEYS_TIMEOUT", 0)
    for name, kind in (("pod", "v4-16"), ("solo", "v4-8")):
        code, out, err = tpu_ops("create", name, "--type", kind, "--zone", "us-central2-b")
        assert (code, out.startswith(f"{name}-w0")) == (0, True)
        assert err.endswith(f"next: tpu_ops refresh --trust-first {name}\n")
        assert "log in" not in err
    fleet.api.clear_faults()
    assert "log in: tpu_ops ssh pod" in tpu_ops("create", "pod", "--type", "v4-16", "--zone", "us-central2-b")[2]


def trusted(file):
    return known_hosts.trusted_first(file.read_text())


def shown(out):
    return [line.split() for line in out.splitlines() if "SHA256" in line]


def test_a_node_that_publishes_nothing_is_told_of_with_the_way_out(pod, tpu_ops):
    _, _, err = tpu_ops("refresh")
    assert "node pod: no host key published for pod-w0, pod-w1, so ssh there is refused (disabled (NOT_FOUND))" in err
    assert "`tpu_ops refresh --trust-first pod`" in err


def test_trust_first_warns_if_the_published_keys_cannot_be_read(fleet, pod, tpu_ops, terminal):
    fleet.api.clear_faults()
    fleet.api.fault(method="GetGuestAttributes", project=fleet.project, code="PERMISSION_DENIED", message="no")
    told = (
        "node pod: you have no permission to read the host keys that it publishes, so ssh to pod-w0, pod-w1 is refused"
    )
    err = tpu_ops("refresh")[2]
    assert told in err
    assert "no host key published" not in err
    terminal("y\n")
    code, _, err = tpu_ops("refresh", "--trust-first", "pod")
    assert (code, told in err, len(trusted(pod))) == (0, True, 2)


def test_confirmed_host_keys_are_recorded(pod, tpu_ops, terminal):
    terminal("y\n")
    code, out, err = tpu_ops("refresh", "--trust-first", "pod")
    assert code == 0
    assert shown(out) == [[host, "ssh-ed25519", PRINT[host]] for host in PRINT]
    assert "trust these 2 host keys from now on? [y/N]" in err
    assert "no host key published" not in err
    assert len(trusted(pod)) == 2
    code, out, err = tpu_ops("refresh", "--trust-first", "pod")
    assert (code, shown(out)) == (0, [])
    assert "pod-w1 was trusted on first contact before" in err


@pytest.mark.parametrize("text", ["n\n", "", "yess\n"])
def test_unconfirmed_keys_are_not_recorded(pod, tpu_ops, terminal, text):
    terminal(text)
    failed(tpu_ops("refresh", "--trust-first", "pod"), 1, "not confirmed", printed=True)
    assert trusted(pod) == set()


def test_without_a_terminal_the_fingerprints_are_shown_and_what_to_add(pod, tpu_ops, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    result = tpu_ops("refresh", "--trust-first", "pod")
    failed(result, 2, "add --yes", printed=True)
    assert len(shown(result[1])) == 2
    assert trusted(pod) == set()
    assert tpu_ops("refresh", "--trust-first", "pod", "--yes")[0] == 0
    assert len(trusted(pod)) == 2


def test_a_dry_run_shows_and_records_nothing(pod, tpu_ops):
    code, out, _ = tpu_ops("refresh", "--trust-first", "pod", "--dry-run")
    assert (code, len(shown(out))) == (0, 2)
    assert not pod.exists()


def test_a_silent_worker_is_named_and_the_others_are_recorded(pod, tpu_ops, silent):
    silent.add("pod-w0")
    result = tpu_ops("refresh", "--trust-first", "pod", "--yes")
    failed(result, 4, "1 of 2 workers", "pod-w0", "Connection refused", printed=True)
    assert [line[0] for line in shown(result[1])] == ["pod-w1"]
    assert len(trusted(pod)) == 1
    silent.clear()
    code, out, _ = tpu_ops("refresh", "--trust-first", "pod", "--yes")
    assert (code, [line[0] for line in shown(out)]) == (0, ["pod-w0"])


def test_without_any_answer_there_is_nothing_to_confirm(pod, tpu_ops, silent):
    silent.update(PRINT)
    failed(tpu_ops("refresh", "--trust-first", "pod"), 4, "2 of 2 workers", printed=True)


@pytest.mark.parametrize("dry_run", [(), ("--dry-run",)])
@pytest.mark.parametrize("code", ["UNAVAILABLE", "RESOURCE_EXHAUSTED", "INTERNAL"])
def test_a_key_that_may_be_published_is_not_taken_from_the_worker_itself(fleet, pod, tpu_ops, dry_run, code):
    # With more it would be repeated for a quarter of a minute.
    fleet.write(request_timeout=0.5)
    fleet.api.clear_faults()
    fleet.api.fault(project=fleet.project, method="GetGuestAttributes", code=code, message="a bad moment")
    result = tpu_ops("refresh", "--trust-first", "pod", "--yes", *dry_run)
    unknown = "it is unknown whether these workers publish their host keys"
    failed(result, 3, unknown, "a bad moment", "pod-w[0-1]", printed=True)
    assert shown(result[1]) == []
    assert "contacting" not in result[2]
    assert not pod.exists() or trusted(pod) == set()


@pytest.mark.parametrize("dry_run", [(), ("--dry-run",)])
def test_a_published_key_is_never_taken_from_the_worker_itself(fleet, tpu_ops, dry_run, monkeypatch):
    fleet.create("pod", "v4-16")
    code, out, err = tpu_ops("refresh", "--trust-first", "pod", "--yes", *dry_run)
    assert (code, shown(out)) == (0, [])
    assert "pod-w0 publishes its host key" in err
    if not dry_run:
        assert trusted(fleet.settings().state_dir / "known_hosts") == set()


def test_several_nodes_and_json(pod, tpu_ops, fleet, silent):
    fleet.create("solo")
    silent.add("pod-w1")
    failed(tpu_ops("refresh", "--trust-first", "pod", "--json"), 2, "--dry-run", printed=True)
    code, out, _ = tpu_ops("refresh", "--trust-first", "pod", "--trust-first", "solo", "--json", "--yes")
    told = json.loads(out)
    assert code == 4
    assert [row["worker"] for row in told["contacted"]] == ["pod-w0", "solo-w0"]
    assert told["contacted"][0]["fingerprint"] == PRINT["pod-w0"]
    assert told["silent"] == {"pod-w1": "Connection refused"}


def test_yes_alone_confirms_nothing(fleet, tpu_ops):
    failed(tpu_ops("refresh", "--yes"), 2, "--trust-first")


def test_a_later_publication_of_another_key_is_an_alarm(pod, tpu_ops, fleet):
    assert tpu_ops("refresh", "--trust-first", "pod", "--yes")[0] == 0
    before = pod.read_text()
    fleet.api.clear_faults()
    failed(tpu_ops("refresh"), 1, "pod-w0", "trusted on first contact", "ssh-keygen -R")
    assert pod.read_text() == before


def test_a_changed_key_stops_commands_and_the_inventory_alike(fleet, tpu_ops):
    """One of two key types has changed. The node is asked because no key of its other worker is known."""
    fleet.create("pod", "v4-16")
    assert tpu_ops("refresh")[0] == 0
    file = fleet.settings().state_dir / "known_hosts"
    _, second = sorted(known_hosts.parse(file.read_text()))
    changed = {second: {"ssh-ed25519": key("other"), "ssh-rsa": key("of the same", "ssh-rsa")}}
    file.write_text(known_hosts.text_of(changed))
    before = {path.name: path.read_text() for path in file.parent.iterdir()}
    failed(tpu_ops("refresh"), 1, "pod-w1", "CHANGED")
    done = fleet.ansible("ansible-inventory", "--list", "--flush-cache")
    assert done.returncode != 0
    assert "CHANGED" in done.stderr
    assert {path.name: path.read_text() for path in file.parent.iterdir()} == before
