"""Several processes that read one fleet and write its files: the files have the results of all."""

from __future__ import annotations

import pytest

from tpu_ops.fleet import origin, selection, view
from tpu_ops.ssh import guest_attributes, host_keys
from tpu_ops.ssh.host_keys import HostKeyAlarm


@pytest.fixture
def meanwhile(monkeypatch):
    """Returns what has something be done by another process as soon as a module's function has its answer."""

    def during(module, name, act):
        answered = getattr(module, name)

        def slow(*args, **options):
            monkeypatch.setattr(module, name, answered)
            answer = answered(*args, **options)
            act()
            return answer

        monkeypatch.setattr(module, name, slow)

    return during


def test_a_changed_key_is_an_alarm_despite_a_concurrent_newer_view(fleet, meanwhile):
    fleet.create("pod", "v4-16")
    settings = fleet.settings()
    seen, _ = view.refresh(settings)
    first, second = (worker.host_key_alias for worker in seen.workers)
    text = seen.known_hosts.read_text()
    seen.known_hosts.write_text(text.replace(first, "tmp").replace(second, first).replace("tmp", second))
    before = host_keys.keys_of(settings)
    meanwhile(origin, "ask", lambda: view.refresh(settings))
    with pytest.raises(HostKeyAlarm, match=r"pod-w0.*CHANGED"):
        view.refresh(settings, verify_keys=True)
    assert host_keys.keys_of(settings) == before


@pytest.mark.parametrize("then", ["stays", "goes", "cannot be asked for"])
def test_a_node_that_is_made_anew_while_its_keys_are_compared_is_no_alarm(fleet, meanwhile, then):
    fleet.create("pod", "v4-16")
    settings = fleet.settings()
    view.refresh(settings)
    before = host_keys.keys_of(settings)

    def remade() -> None:
        fleet.act("delete", "pod")
        fleet.create("pod", "v4-16")
        if then == "cannot be asked for":
            fleet.api.fault(project=fleet.project, method="GetNode", code="PERMISSION_DENIED", message="denied")

    meanwhile(guest_attributes, "wanted", remade)
    if then == "cannot be asked for":
        with pytest.raises(HostKeyAlarm, match=r"pod-w0.*CHANGED"):
            view.refresh(settings, verify_keys=True)
        fleet.api.clear_faults()
        return
    if then == "goes":
        meanwhile(guest_attributes, "fetch", lambda: fleet.act("delete", "pod"))
    seen, _ = view.refresh(settings, verify_keys=True)
    assert host_keys.keys_of(settings) == before
    assert seen.compared == dict.fromkeys(
        ("pod-w0", "pod-w1"), "the node was deleted or recreated while its host keys were being read"
    )
    _, changes = view.refresh(settings)
    assert (changes.recreated, changes.gone) == ((("pod",), ()) if then == "stays" else ((), ("pod",)))


def test_learnt_keys_are_kept_despite_a_concurrent_newer_view(fleet, meanwhile):
    fleet.create("pod", "v4-16", networkConfig={"enableExternalIps": False})
    fleet.write(iap=True)
    settings = fleet.settings()

    def by_another() -> None:
        fleet.create("new")
        view.refresh(settings, learn=False)

    meanwhile(origin, "ask", by_another)
    seen, changes = view.refresh(settings)
    assert ([node.name for node in seen.nodes], bool(changes)) == (["new", "pod"], False)
    pods = [worker for worker in seen.workers if worker.label == "pod"]
    assert set(host_keys.keys_of(settings)) == {worker.host_key_alias for worker in pods}
    assert all(worker.instance_name for worker in pods)
    # Of the node that only the other process saw nobody asked for keys yet.
    assert [text.partition(":")[0] for text in seen.warnings] == ["node new"]
    kept = view.known(settings)
    assert kept is not None
    assert (kept.nodes, kept.asked_at) == (seen.nodes, seen.asked_at)


def test_a_reader_puts_no_old_addresses_back_into_ssh_config(fleet, meanwhile):
    fleet.create("pod", "v4-16")
    settings = fleet.settings()
    view.refresh(settings)

    def by_another() -> None:
        fleet.act("stop", "pod")
        fleet.act("start", "pod")
        view.refresh(settings)

    meanwhile(selection, "ssh_configs", by_another)
    seen = view.current(settings)
    newest, changes = view.refresh(settings)
    assert not changes
    assert seen.nodes == newest.nodes
    assert f"HostName {newest.workers[0].external_ip}" in seen.ssh_config.read_text()
