"""A member's view after a published snapshot was read: hosts, keys and refusals."""

from __future__ import annotations

import time

import pytest

from tests.support.nodes import key
from tests.support.published import KEYS, NOW, POD, SOLO, text
from tpu_ops.errors import CloudError, UsageError
from tpu_ops.fleet import origin, view
from tpu_ops.fleet.publishing import documents, published, sources
from tpu_ops.ssh.host_keys import HostKeyAlarm
from tpu_ops.ssh.known_hosts import parse as parse_known_hosts


def state(member) -> dict[str, str]:
    folder = member.settings().state_dir
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()} if folder.exists() else {}


def test_a_member_has_hosts_and_keys_and_the_source_is_asked_again(member, file):
    settings = member.settings()
    fleet, changes = view.refresh(settings, source=str(file))
    assert (changes.first, fleet.source, fleet.asked_at, fleet.warnings) == (True, str(file), NOW, ())
    assert [worker.host for worker in fleet.workers] == ["pod-w0", "pod-w1", "solo-w0"]
    assert parse_known_hosts(fleet.known_hosts.read_text()) == KEYS
    assert "HostName 34.0.1.1" in fleet.ssh_config.read_text()
    moved = POD._replace(external_ips=("34.0.9.0", "34.0.9.1"))
    file.write_text(text([moved, SOLO], asked_at=NOW + 60))
    assert view.current(settings).asked_at == NOW
    assert [change.new for change in view.look(settings)[1].addresses] == ["34.0.9.0", "34.0.9.1"]
    fleet, changes = view.refresh(settings)
    assert [change.new for change in changes.addresses] == ["34.0.9.0", "34.0.9.1"]
    assert "HostName 34.0.9.1" in fleet.ssh_config.read_text()


def test_nodes_of_an_unlisted_zone_of_a_snapshot_stay_with_a_warning(member, file):
    settings = member.settings()
    view.refresh(settings, source=str(file))
    found = documents.document(NOW + 60, ("lab", "other"), (), (POD,), KEYS, unlisted=[("other", SOLO.zone)])
    file.write_text(found.text())
    for fleet in (view.look(settings)[0], view.refresh(settings)[0], view.current(settings)):
        assert [node.name for node in fleet.nodes] == ["pod", "solo"]
        (warning,) = fleet.warnings
        assert warning.startswith(f"project other, zone {SOLO.zone}: could not be listed when the snapshot was")
    # What is passed on says so, too.
    assert view.current(settings).unanswered == (("other", SOLO.zone),)
    file.write_text(text([POD], asked_at=NOW + 120))
    fleet = view.refresh(settings)[0]
    assert ([node.name for node in fleet.nodes], fleet.warnings) == (["pod"], ())


def test_the_first_command_of_a_member_reads_what_the_settings_name(member, file, monkeypatch):
    monkeypatch.setenv("TPU_OPS_SNAPSHOT", str(file))
    assert view.current(member.settings(TPU_OPS_SNAPSHOT=str(file))).source == str(file)


def test_a_relative_path_in_the_settings_begins_at_the_fleets_file(member):
    (member.file.parent / "published.json").write_text(text())
    member.write(snapshot="published.json")
    assert view.current(member.settings()).source == str(member.file.parent / "published.json")


def test_a_fleet_that_names_nothing_is_what_the_published_snapshot_is_of(member, file):
    member.write()
    fleet, _ = view.refresh(member.settings(), source=str(file))
    assert [node.name for node in fleet.nodes] == ["pod", "solo"]
    for again in (view.current(member.settings()), view.look(member.settings())[0]):
        assert (again.source, again.listed) == (str(file), fleet.listed)


@pytest.mark.parametrize("source", [None, sources.API])
def test_the_api_is_not_asked_for_no_project(member, file, source):
    member.write(endpoint="127.0.0.1:1", **({"snapshot": str(file)} if source is not None else {}))
    with pytest.raises(UsageError, match="no project is set") as caught:
        view.look(member.settings(), source=source)
    assert str(member.file) in caught.value.where
    assert "`tpu_ops refresh --from SOURCE`, key `snapshot` or TPU_OPS_SNAPSHOT" in caught.value.fix


def test_the_configured_snapshot_wins_over_the_remembered_one(member, file, tmp_path):
    view.refresh(member.settings(), source=str(file))
    other = tmp_path / "other.json"
    other.write_text(text([SOLO], asked_at=NOW + 1))
    member.write(projects=["lab", "other"], snapshot=str(other))
    assert origin.source_of(member.settings()) == str(other)
    assert view.known(member.settings()) is None
    assert [node.name for node in view.current(member.settings()).nodes] == ["solo"]
    # An older one does not take what is newer away: it is said and passed over.
    other.write_text(text([SOLO], asked_at=NOW - 1))
    file.write_text(text(asked_at=NOW + 2))
    view.refresh(member.settings()._replace(snapshot=""), source=str(file))
    assert view.current(member.settings()).source == str(file)


def test_back_to_the_api_needs_credentials_and_what_is_known_stays(member, file):
    view.refresh(member.settings(), source=str(file))
    before = state(member)
    with pytest.raises(CloudError, match="no credentials") as caught:
        view.refresh(member.settings(), source=sources.API)
    assert "log in" in caught.value.fix
    assert str(file) in caught.value.fix
    assert state(member) == before


def test_the_api_replaces_a_published_snapshot_whatever_its_time(fleet, tmp_path):
    """The clock of the machine that published may be ahead."""
    fleet.create("pod", "v4-16")
    path = tmp_path / "snapshot.json"
    path.write_text(documents.document(time.time() + 300, (fleet.project,), (), (), {}).text())
    assert view.refresh(fleet.settings(), source=str(path))[0].nodes == ()
    found, changes = view.refresh(fleet.settings(), source=sources.API)
    assert ([node.name for node in found.nodes], changes.new, found.source) == (["pod"], ("pod",), "")


def test_an_older_snapshot_is_refused_and_nothing_is_written(member, file):
    view.refresh(member.settings(), source=str(file))
    before = state(member)
    file.write_text(text([SOLO], asked_at=NOW - 3600))
    for ask in (view.refresh, view.look):
        with pytest.raises(published.OutdatedError, match="older than the local one") as caught:
            ask(member.settings())
        assert "--from api" in caught.value.fix
    assert state(member) == before


def test_a_changed_key_of_the_same_node_is_an_alarm_and_nothing_is_written(member, file):
    view.refresh(member.settings(), source=str(file))
    before = state(member)
    file.write_text(text(keys=KEYS | {"tpu-1-w1": {"ssh-ed25519": key("evil")}}, asked_at=NOW + 1))
    with pytest.raises(HostKeyAlarm, match=r"pod-w1.*CHANGED"):
        view.refresh(member.settings())
    assert state(member) == before


def test_a_recreated_node_comes_with_its_new_keys(member, file):
    view.refresh(member.settings(), source=str(file))
    anew = POD._replace(node_id="77")
    file.write_text(text([anew], {"tpu-77-w0": {"ssh-ed25519": key("n")}}, NOW + 1))
    fleet, changes = view.refresh(member.settings())
    assert (changes.recreated, changes.gone) == (("pod",), ("solo",))
    assert set(parse_known_hosts(fleet.known_hosts.read_text())) == {"tpu-2-w0", "tpu-77-w0"}
    assert any("pod-w1" in warning and "the published snapshot has none" in warning for warning in fleet.warnings)


@pytest.mark.parametrize(
    ("options", "names", "warnings"),
    [
        ({"projects": ["other"]}, ["solo"], []),
        ({"projects": ["lab"], "zones": ["us-central2-b"]}, ["pod"], []),
        ({"projects": ["lab", "mine"]}, ["pod"], ["project mine"]),
        ({"projects": ["lab", "other"], "names": ["so*"]}, ["solo"], []),
        ({"projects": ["lab", "other"], "labels": {"team": "vision"}}, ["pod"], []),
        ({"snapshot": "unset"}, ["pod", "solo"], []),
    ],
)
def test_a_members_own_projects_zones_and_filters_hold(member, file, options, names, warnings):
    member.write(**{name: str(file) if name == "snapshot" else value for name, value in options.items()})
    fleet, _ = view.refresh(member.settings(), source=str(file))
    assert [node.name for node in fleet.nodes] == names
    assert [warning.partition(":")[0] for warning in fleet.warnings] == warnings


def test_a_snapshot_of_other_projects_is_an_error_and_no_empty_fleet(member, file):
    member.write(projects=["mine"])
    with pytest.raises(UsageError, match="about lab and other, but this fleet needs mine"):
        view.refresh(member.settings(), source=str(file))
