"""Nodes that configure themselves when they boot: what `create` and `apply` publish for them, against a real API."""

from __future__ import annotations

import ast
import hashlib
import json
from typing import Any

import pytest
import yaml

from tests.support.buckets import NUMBERS, client_of
from tests.support.fleet import ZONE, FleetDir
from tpu_ops.ansible import first_boot, playbook, values

#: Variables of the inventory that are not known before a node exists.
LATER = {
    *("tpu_create_time", "tpu_host_key_alias", "tpu_metadata_keys", "tpu_node_id", "tpu_service_account"),
    *("tpu_external_ip", "tpu_external_ips", "tpu_internal_ip", "tpu_internal_ips"),
}
SECRET = "s3cret"
ALL = {
    "credentials_entries": [{"person": "ada", "kind": "huggingface", "secret": SECRET}],
    "own_token": "{{ lookup('env', 'OWN_TOKEN') }}",
}


@pytest.fixture
def bucket(fleet: FleetDir, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A bucket of the fleet's project."""
    monkeypatch.setenv("OWN_TOKEN", SECRET)
    (fleet.path / "inventory" / "group_vars").mkdir()
    (fleet.path / "inventory" / "group_vars" / "all.yml").write_text(yaml.safe_dump(ALL))
    return client_of(fleet.api, monkeypatch).create_bucket(f"boot-{next(NUMBERS)}", project=fleet.project)


def bundle_of(fleet: FleetDir, bucket: Any, name: str, zone: str = ZONE) -> dict[str, Any]:
    """Return the bundle of a node as its startup script fetches it, after checking all digests."""
    _, node = fleet.api.call("GET", f"v2/{fleet.location(zone)}/nodes/{name}")
    script = node["metadata"]["startup-script"]
    assert script.startswith("#!/usr/bin/python3 -I\n")
    last = ast.parse(script).body[-1]
    assert isinstance(last, ast.Expr)
    assert isinstance(last.value, ast.Call)
    call = last.value.args[0]
    assert isinstance(call, ast.Call)
    place, digest, origin = (ast.literal_eval(argument) for argument in call.args)
    assert (f"gs://{place}", origin) == (node["metadata"][first_boot.KEY], fleet.api.rest)
    data = bucket.blob(place.removeprefix(f"{bucket.name}/")).download_as_bytes()
    assert hashlib.sha256(data).hexdigest() == digest
    found: dict[str, Any] = json.loads(data)
    folder = place.rpartition("/")[0]
    for each in found["archives"]:
        archive = bucket.blob(f"{folder}/{each[:16]}.tar.gz".removeprefix(f"{bucket.name}/")).download_as_bytes()
        assert hashlib.sha256(archive).hexdigest() == each
    return found


def test_each_worker_gets_what_a_controller_would_send_it_except_for_secrets(
    fleet: FleetDir, bucket: Any, tpu_ops: Any
) -> None:
    fleet.create("store")
    tpu_ops("refresh")
    node: tuple[str, ...] = ("create", "pod", "--type", "v4-16", "--zone", ZONE, "--label", "team=vision", "--spot")
    node = (*node, "--configure-at-boot", f"gs://{bucket.name}/tpu/")
    code, out, _ = tpu_ops(*node, "--dry-run")
    assert (code, "'startup-script': '(" in out, list(bucket.list_blobs())) == (0, True, [])
    code, _, err = tpu_ops(*node)
    assert code == 0, err
    assert "site.yml runs on pod now; `tpu_ops configure pod` waits for it, and adds the secrets" in err
    bundle = bundle_of(fleet, bucket, "pod")
    assert SECRET not in json.dumps(bundle)
    project = playbook.project_of(fleet.path, fleet.file)
    hosts = [f"pod-w{index}" for index in range(2)]
    later = values.compute(project, project.playbook("site"), hosts=hosts, secrets=False)
    assert [order["playbook"] for order in bundle["orders"]] == ["site", "site"]
    for index, order in enumerate(bundle["orders"]):
        own = later.hosts[f"pod-w{index}"]
        for before, after in zip(
            [*order["inventories"], *order["extras"]],
            [later.shared.inventory, own.inventory, later.shared.extra, own.extra, '{"python_share_downloads": false}'],
            strict=True,
        ):
            assert known(before) == known(after)


def known(text: str) -> Any:
    """Return a YAML file without the variables that are not known before a node exists."""

    def without(value: Any) -> Any:
        return (
            {key: without(each) for key, each in value.items() if key not in LATER}
            if isinstance(value, dict)
            else value
        )

    return without(yaml.safe_load(text.replace("!unsafe", "")))


def test_nodes_yml_has_the_same_key_and_apply_publishes_only_for_nodes_that_it_creates(
    fleet: FleetDir, bucket: Any, tpu_ops: Any
) -> None:
    entry = {"name": "dev-[1-2]", "type": "v4-8", "zones": [ZONE], "configure_at_boot": f"gs://{bucket.name}"}
    (fleet.path / "nodes.yml").write_text(yaml.safe_dump({"nodes": [entry]}))
    code, _, err = tpu_ops("apply", "--yes", "--no-configure")
    assert code == 0, err
    first, second = (bundle_of(fleet, bucket, name) for name in ("dev-1", "dev-2"))
    assert "dev-1-w0" in first["orders"][0]["inventories"][1]
    assert "dev-2-w0" in second["orders"][0]["inventories"][1]
    for blob in bucket.list_blobs():
        blob.delete()
    assert tpu_ops("apply", "--yes", "--no-configure")[0] == 0
    assert list(bucket.list_blobs()) == []


@pytest.mark.usefixtures("bucket")
@pytest.mark.parametrize(
    ("place", "more", "words"),
    [
        ("bucket/tpu", (), ("'bucket/tpu' is no place in a bucket", "--configure-at-boot", "gs://BUCKET/PREFIX")),
        ("gs://never-made/tpu", (), ("the object cannot be written", "gs://never-made/tpu/", "tpu_ops bucket create")),
        ("gs://never-made/tpu", ("--metadata", "startup-script=true"), ("has a startup script for it already",)),
    ],
)
def test_what_cannot_work_is_refused_before_a_node_is_created(
    fleet: FleetDir, tpu_ops: Any, place: str, more: tuple[str, ...], words: tuple[str, ...]
) -> None:
    code, _, err = tpu_ops("create", "pod", "--type", "v4-8", "--zone", ZONE, "--configure-at-boot", place, *more)
    assert code
    assert [word for word in words if word not in err] == []
    assert fleet.api.call("GET", f"v2/{fleet.location()}/nodes")[1].get("nodes", []) == []


def test_a_fleet_whose_roles_need_a_secret_is_refused_with_the_variable(
    fleet: FleetDir, bucket: Any, tpu_ops: Any
) -> None:
    variables = {"base_pip_index_url": "https://me:{{ own_token }}@index.test/simple"}
    (fleet.path / "inventory" / "group_vars" / "node_pod.yml").write_text(yaml.safe_dump(variables))
    argv = ("create", "pod", "--type", "v4-8", "--zone", ZONE, "--configure-at-boot", f"gs://{bucket.name}")
    assert tpu_ops(*argv, "--dry-run")[0] == 2
    code, _, err = tpu_ops(*argv)
    assert code == 2
    assert "the node cannot configure itself" in err
    assert "base_pip_index_url: own_token, which it needs, may be secret" in err
