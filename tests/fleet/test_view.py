"""The view of the fleet: what is learned, written, kept and refused, against a real API process."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.support.nodes import key
from tests.support.published import KEYS, NOW, POD, SOLO
from tpu_ops.cloud.listing import list_nodes
from tpu_ops.cloud.node import workers_of
from tpu_ops.errors import CloudError
from tpu_ops.fleet import origin, selection, view
from tpu_ops.fleet.publishing import documents
from tpu_ops.fleet.publishing.published import OutdatedError
from tpu_ops.fleet.state import Files
from tpu_ops.ssh import guest_attributes, host_keys, masters
from tpu_ops.ssh.host_keys import HostKeyAlarm
from tpu_ops.ssh.known_hosts import TRUSTED_FIRST
from tpu_ops.ssh.known_hosts import parse as parse_known_hosts


def files(settings):
    return {path.name: path.read_text() for path in settings.state_dir.iterdir() if path.name != "lock"}


def test_a_first_look_writes_everything(fleet):
    fleet.create("pod", "v4-16")
    settings = fleet.settings()
    seen, changes = view.refresh(settings)
    assert changes.first
    assert [worker.host for worker in seen.workers] == ["pod-w0", "pod-w1"]
    assert seen.warnings == ()
    assert sorted(parse_known_hosts(seen.known_hosts.read_text())) == [worker.host_key_alias for worker in seen.workers]
    assert f"HostName {seen.workers[1].external_ip}" in seen.ssh_config.read_text()
    assert {path.name: path.stat().st_mode & 0o777 for path in settings.state_dir.iterdir()} == {
        "lock": 0o600,
        "snapshot.json": 0o600,
        "shown.json": 0o600,
        "ssh_config": 0o600,
        "known_hosts": 0o644,
    }
    assert settings.state_dir.stat().st_mode & 0o777 == 0o700


def test_known_views_are_read_without_the_api(fleet, monkeypatch):
    fleet.create("pod", "v4-16")
    seen = view.current(fleet.settings())
    monkeypatch.setattr(origin, "api", None)
    again = view.current(fleet.settings())
    assert (again.nodes, again.workers, again.asked_at) == (seen.nodes, seen.workers, seen.asked_at)


def test_an_ssh_config_of_other_settings_is_written_anew(fleet):
    fleet.create("pod", "v4-16")
    view.refresh(fleet.settings())
    fleet.write(user="grace", connect_with=["internal"])
    seen = view.current(fleet.settings())
    text = seen.ssh_config.read_text()
    assert "User grace" in text
    assert f"HostName {seen.workers[0].internal_ip}" in text


def test_a_login_that_only_one_shell_has_is_in_no_file_that_others_read(fleet, monkeypatch):
    fleet.create("pod", "v4-16")
    # An endpoint of the environment is its shell's alone.
    fleet.write(endpoint=fleet.api.grpc)
    plain = view.refresh(fleet.settings())[0]
    text = plain.ssh_config.read_text()
    monkeypatch.setenv("TPU_OPS_USER", "eve")
    hers = view.current(fleet.settings())
    assert hers.ssh_config.parent == plain.ssh_config.parent
    assert "User eve" in hers.ssh_config.read_text()
    assert "eve" not in plain.ssh_config.read_text() == text
    fleet.act("stop", "pod")
    fleet.act("start", "pod")
    seen = view.refresh(fleet.settings())[0]
    assert [
        f"HostName {seen.workers[0].external_ip}" in file.read_text() for file in (hers.ssh_config, plain.ssh_config)
    ] == [True, True]
    assert "eve" not in plain.ssh_config.read_text()


def test_another_project_is_another_question(fleet):
    fleet.create("pod", "v4-16")
    view.refresh(fleet.settings())
    fleet.write(projects=[fleet.second])
    assert view.current(fleet.settings()).nodes == ()


def test_a_look_writes_nothing(fleet):
    settings = fleet.settings()
    view.refresh(settings)
    before = files(settings)
    fleet.create("pod")
    assert view.look(settings)[1].new == ("pod",)
    assert files(settings) == before


def test_a_changed_address_is_news_and_the_host_keys_stay(fleet):
    fleet.create("pod", "v4-16")
    settings = fleet.settings()
    before, _ = view.refresh(settings)
    keys = before.known_hosts.read_text()
    fleet.act("stop", "pod")
    view.refresh(settings)
    assert before.known_hosts.read_text() == keys
    fleet.act("start", "pod")
    after, changes = view.refresh(settings)
    assert before.known_hosts.read_text() == keys
    assert [change.new for change in changes.addresses if change.kind == "external"] == [
        worker.external_ip for worker in after.workers
    ]
    assert {worker.external_ip for worker in before.workers}.isdisjoint(worker.external_ip for worker in after.workers)
    assert all(worker.external_ip in after.ssh_config.read_text() for worker in after.workers)


def test_a_recreated_node_is_accepted_with_its_new_keys(fleet):
    fleet.create("pod", "v4-16")
    settings = fleet.settings()
    before, _ = view.refresh(settings)
    fleet.act("delete", "pod")
    fleet.create("pod", "v4-16")
    after, changes = view.refresh(settings)
    assert changes.recreated == ("pod",)
    assert changes.addresses == ()
    known = parse_known_hosts(after.known_hosts.read_text())
    assert sorted(known) == sorted(worker.host_key_alias for worker in after.workers)
    assert not set(known) & {worker.host_key_alias for worker in before.workers}


def test_a_person_is_told_of_all_that_changed_since_they_were_told_last(fleet):
    """Ansible, a command with an outdated address, or `create` may have asked the API meanwhile."""
    fleet.create("pod", "v4-16")
    fleet.create("old")
    settings = fleet.settings()
    view.refresh(settings)
    fleet.act("delete", "pod")
    fleet.create("pod", "v4-16")
    assert view.newest(settings)[1].recreated == ("pod",)
    fleet.act("delete", "old")
    assert view.refresh(settings)[1].gone == ("old",)
    fleet.create("new")
    looked, (_, told) = view.look(settings)[1], view.refresh(settings, told=True)
    assert (told.recreated, told.gone, told.new) == (("pod",), ("old",), ("new",))
    assert looked == told
    assert not view.refresh(settings, told=True)[1]
    assert not view.look(settings)[1]


def test_without_a_readable_shown_snapshot_the_last_known_one_counts(fleet):
    settings = fleet.settings()
    view.refresh(settings, told=True)
    for spoil in (lambda path: path.write_text("{"), lambda path: path.unlink()):
        spoil(Files(settings.state_dir).shown)
        fleet.create(f"pod{len(view.refresh(settings)[0].nodes)}")
        assert len(view.refresh(settings, told=True)[1].new) == 1
    fleet.write(projects=[fleet.project, fleet.second])
    assert view.refresh(fleet.settings(), told=True)[1].first


def test_masters_of_addresses_that_were_left_are_ended(fleet, monkeypatch):
    fleet.create("pod", "v4-16")
    fleet.create("solo")
    before, _ = view.refresh(fleet.settings())
    ways, ended = selection.ways_of(fleet.settings(), before.listed), list[tuple[str, str]]()
    monkeypatch.setattr(masters, "end_left", lambda left, user, mux: ended.extend(left))
    fleet.act("stop", "pod")
    fleet.act("start", "pod")
    fleet.act("delete", "solo")
    view.refresh(fleet.settings())
    assert {(worker.external_ip, ways.of(worker).control) for worker in before.workers} <= set(ended)
    ended.clear()
    view.refresh(fleet.settings())
    assert ended == []


def test_a_changed_key_on_the_same_node_stops_and_writes_nothing(fleet):
    fleet.create("pod", "v4-16")
    fleet.create("solo")
    settings = fleet.settings()
    seen, _ = view.refresh(settings)
    first, second = (worker.host_key_alias for worker in seen.workers[:2])
    swapped = seen.known_hosts.read_text().replace(first, "tmp").replace(second, first).replace("tmp", second)
    seen.known_hosts.write_text(swapped)
    fleet.act("delete", "solo")
    before = files(settings)
    with pytest.raises(HostKeyAlarm, match=r"pod-w0.*CHANGED"):
        view.refresh(settings, verify_keys=True)
    assert files(settings) == before


def published(folder, nodes, keys, seconds):
    """Return the path of a published snapshot of some nodes, asked for some seconds after the others."""
    path = folder / f"published-{seconds}.json"
    path.write_text(documents.document(NOW + seconds, ("lab", "other"), (), tuple(nodes), keys).text())
    return str(path)


@pytest.mark.parametrize(
    "between",
    [[POD], [POD, SOLO._replace(state="STOPPED", internal_ips=())], []],
    ids=["left out", "without endpoints", "nothing"],
)
def test_a_node_that_was_out_of_sight_may_not_come_back_with_another_key(member, tmp_path, between):
    settings = member.settings()
    view.refresh(settings, source=published(tmp_path, [POD, SOLO], KEYS, 0))
    view.refresh(settings, source=published(tmp_path, between, {}, 1))
    changed = KEYS | {"tpu-2-w0": {"ssh-ed25519": key("another")}}
    with pytest.raises(HostKeyAlarm, match=r"solo-w0.*CHANGED"):
        view.refresh(settings, source=published(tmp_path, [POD, SOLO], changed, 2))
    view.refresh(settings, source=published(tmp_path, [POD, SOLO], KEYS, 3))
    assert host_keys.keys_of(settings) == KEYS


def test_a_narrower_question_keeps_the_keys_of_all_and_their_marks(fleet):
    fleet.create("pod", "v4-16")
    fleet.create("lite", "v5litepod-4", zone="us-west4-a")
    seen, _ = view.refresh(fleet.settings())
    marked = seen.known_hosts.read_text().replace("\n", f" {TRUSTED_FIRST}\n")
    seen.known_hosts.write_text(marked)
    fleet.write(zones=["us-west4-a"])
    view.refresh(fleet.settings(), learn=False)
    assert seen.known_hosts.read_text() == marked
    # Of a node that is known to have been made anew the keys are of no use, whatever was asked for in between.
    before = {worker.host_key_alias for worker in seen.workers if worker.label == "lite"}
    fleet.act("delete", "lite", "us-west4-a")
    fleet.create("lite", "v5litepod-4", zone="us-west4-a")
    fleet.write()
    view.refresh(fleet.settings())
    assert before.isdisjoint(host_keys.keys_of(fleet.settings()))
    assert len(host_keys.keys_of(fleet.settings())) == 3


def test_a_narrower_question_does_not_let_an_older_snapshot_in(member, tmp_path):
    everything = member.settings()._replace(projects=("lab", "other"))
    narrow = everything._replace(zones=("us-central2-b",))
    old = published(tmp_path, [POD, SOLO], KEYS, 0)
    view.refresh(everything, source=published(tmp_path, [POD, SOLO], KEYS, 9))
    before = files(everything)
    for ask in (view.look, view.refresh):
        with pytest.raises(OutdatedError, match="older than the local one"):
            ask(narrow, source=old)
    assert files(everything) == before


def test_known_nodes_are_not_asked_for_their_keys_again(fleet, monkeypatch):
    fleet.create("pod", "v4-16")
    view.refresh(fleet.settings())
    asked: list[int] = []
    fetch = guest_attributes.fetch

    def counted(tpu, nodes, **options):
        asked.append(len(nodes))
        return fetch(tpu, nodes, **options)

    monkeypatch.setattr(guest_attributes, "fetch", counted)
    view.refresh(fleet.settings())
    fleet.create("solo")
    view.refresh(fleet.settings())
    assert asked == [0, 1]


def test_nodes_of_a_project_that_does_not_answer_are_not_gone(fleet):
    fleet.create("pod", "v4-16")
    fleet.create("theirs", project=fleet.second)
    fleet.write(projects=[fleet.project, fleet.second])
    before, _ = view.refresh(fleet.settings())
    keys = before.known_hosts.read_text()
    fleet.api.fault(project=fleet.second, code="PERMISSION_DENIED", message="denied")
    after, changes = view.refresh(fleet.settings())
    fleet.api.clear_faults()
    assert not changes
    assert after.nodes == before.nodes
    assert any(f"project {fleet.second}" in text for text in after.warnings)
    assert after.known_hosts.read_text() == keys
    # Whoever uses what is known learns that a part of it is older, until all is listed again.
    assert view.current(fleet.settings()).warnings == after.warnings
    assert view.refresh(fleet.settings())[0].warnings == ()
    assert view.current(fleet.settings()).warnings == ()


def test_a_wrong_project_is_an_error_and_writes_nothing(fleet):
    fleet.write(projects=["nobodys"])
    settings = fleet.settings()
    with pytest.raises(CloudError, match="nobodys"):
        view.refresh(settings)
    assert not settings.state_dir.exists()


def test_a_missing_ssh_config_of_a_jump_outside_the_fleet_is_written(fleet):
    fleet.create("pod", "v4-16")
    fleet.write(proxy_jump="eve@bastion.example.org")
    seen, _ = view.refresh(fleet.settings())
    file = seen.ssh_config.with_name("jump_config")
    text = file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text("other")
    view.current(fleet.settings())
    assert file.read_text() == text
    file.unlink()
    fleet.write(proxy_jump="pod-w0")
    view.refresh(fleet.settings())
    assert not file.exists()


def test_a_jump_that_the_filters_hide_is_a_worker_of_the_fleet_all_the_same(fleet):
    fleet.create("gate")
    fleet.create("inner", "v4-16", networkConfig={"enableExternalIps": False})
    fleet.write(proxy_jump="gate-w0", names=["inner"])
    settings = fleet.settings()
    seen, _ = view.refresh(settings)
    text = seen.ssh_config.read_text()
    (gate,) = (worker for worker in workers_of(seen.listed) if worker.host == "gate-w0")
    assert f"Host gate-w0 gate\n    HostName {gate.external_ip}\n    HostKeyAlias {gate.host_key_alias}\n" in text
    assert gate.host_key_alias in host_keys.keys_of(settings)
    ways = selection.ways_of(settings, seen.listed)
    assert all(f"-F {seen.ssh_config} " in ways.of(worker).proxy for worker in seen.workers)
    assert (seen.warnings, seen.ssh_config.with_name("jump_config").exists()) == ((), False)
    assert view.current(settings).ssh_config.read_text() == text


@pytest.mark.parametrize(
    ("jump", "warned"),
    [("solo-w0", True), ("ada@solo", True), ("pod-w7", True), ("pod-w1", False), ("pod", False), ("bastion-w0", False)],
)
def test_a_jump_host_with_the_name_form_of_a_worker_is_a_warning(member, tmp_path, jump, warned):
    settings = member.settings()._replace(proxy_jump=jump)
    view.refresh(member.settings(), source=published(tmp_path, [POD, SOLO], KEYS, 0))
    later = published(tmp_path, [POD], KEYS, 1)
    looked, _ = view.look(settings, source=later)
    refreshed, _ = view.refresh(settings, source=later)
    told = (f"proxy_jump {jump.rpartition('@')[2]}: no worker",) if warned else ()
    for seen in (looked, refreshed):
        assert tuple(text[: len(told[0])] if told else text for text in seen.warnings) == told


def test_instance_names_are_asked_for_where_iap_needs_them_and_only_once(fleet):
    fleet.create("inner", "v4-16", networkConfig={"enableExternalIps": False})
    view.refresh(fleet.settings())
    fleet.write(iap=True)
    fleet.api.forget_requests()
    settings = fleet.settings()
    for _ in range(2):
        seen, _ = view.refresh(settings)
        ways = selection.ways_of(settings, seen.listed)
        names = [ways.of(worker).proxy.split()[3] for worker in seen.workers]
        assert [name[-4:] for name in names] == ["-w-0", "-w-1"]
    assert fleet.api.requests(fleet.project)["GetGuestAttributes"] == 1


def test_a_node_without_endpoints_has_no_instance_names(fleet, monkeypatch):
    fleet.create("inner", "v4-16", networkConfig={"enableExternalIps": False})
    fleet.write(iap=True)
    settings = fleet.settings()
    view.refresh(settings)

    def without_endpoints(*args, **options):
        found = list_nodes(*args, **options)
        gone = (entry._replace(state="STOPPED", internal_ips=(), external_ips=()) for entry in found.nodes)
        return replace(found, nodes=tuple(gone))

    with monkeypatch.context() as patch:
        patch.setattr(origin, "list_nodes", without_endpoints)
        seen, _ = view.refresh(settings)
    assert (seen.workers, seen.nodes[0].instance_names) == ((), ())
    assert Files(settings.state_dir).damage() == ""
    assert view.cached(settings).nodes == seen.nodes
    # Back with the same id, it is asked for them again.
    assert all(worker.instance_name for worker in view.refresh(settings)[0].workers)


def test_concurrent_refreshes_leave_whole_files(fleet):
    fleet.create("pod", "v4-16")
    settings, failures = fleet.settings(), []

    def refresh() -> None:
        try:
            view.refresh(settings)
        except Exception as exc:
            failures.append(exc)

    threads = [threading.Thread(target=refresh) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sorted(files(settings)) == ["known_hosts", "shown.json", "snapshot.json", "ssh_config"]
    assert len(view.current(settings).workers) == 2


def test_an_older_answer_does_not_replace_a_newer_one(fleet, monkeypatch):
    settings = fleet.settings()
    fleet.create("pod", "v4-16")
    view.refresh(settings)
    before = files(settings)
    monkeypatch.setattr(origin, "time", SimpleNamespace(time=lambda: 1.0))
    fleet.create("solo")
    seen, changes = view.refresh(settings)
    assert (not changes, [node.name for node in seen.nodes]) == (True, ["pod"])
    assert files(settings) == before
