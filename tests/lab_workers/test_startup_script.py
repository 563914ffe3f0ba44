"""A node's startup script on its workers: at each boot, with the metadata server and the lab's buckets."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.desk import ZONE, Desk, Lab, lab_up

pytestmark = pytest.mark.lab

RESULT = "/root/result"
#: Adds one line of JSON to a file: answers of the metadata server, the content of an object, the user.
SCRIPT = f"""#!/usr/bin/python3
import getpass, json, urllib.error, urllib.request

def fetched(url, **headers):
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as failure:
        return failure.code

FLAVOR = {{"Metadata-Flavor": "Google"}}
V1 = "http://metadata.google.internal/computeMetadata/v1/"
storage = fetched(V1 + "instance/attributes/storage", **FLAVOR)
row = {{
    "worker": fetched(V1 + "instance/attributes/agent-worker-number", **FLAVOR),
    "zone": fetched(V1.replace("metadata.google.internal", "169.254.169.254") + "instance/zone", **FLAVOR),
    "token": fetched(V1 + "instance/service-accounts/default/token", **FLAVOR),
    "no flavor": fetched(V1 + "instance/zone"),
    "object": fetched(storage + "/storage/v1/b/boot/o/bundle?alt=media"),
    "nodes": fetched(storage + "/v2/{ZONE}/nodes"),
    "user": getpass.getuser(),
}}
with open("{RESULT}", "a") as file:
    file.write(json.dumps(row) + "\\n")
print("wrote", len(row), "answers")
"""


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """A shell whose lab has a node of two workers, made with that startup script."""
    folder = tmp_path_factory.mktemp("boot")
    (folder / "boot.py").write_text(SCRIPT)
    with lab_up("boot", folder / "state") as shell:
        lab = Lab(shell)
        assert lab.call("POST", "storage/v1/b?project=lab", {"name": "boot"})[0] == 200
        assert lab.call("POST", "upload/storage/v1/b/boot/o?uploadType=media&name=bundle", ["content"])[0] == 200
        node = ("tpu_ops", "create", "pod", "--type", "v4-16", "--zone", "us-central2-b")
        shell.do(*node, "--startup-script", str(folder / "boot.py"), "--metadata", f"storage={lab.rest}")
        yield shell


def results(lab: Lab, host: str, boots: int) -> list[Any]:
    """Return the rows that the script has written on a worker, once it has run at so many boots."""
    deadline = time.monotonic() + 60
    while len(rows := lab.inside(host, "sh", "-c", f"cat {RESULT} 2>/dev/null || true").splitlines()) < boots:
        assert time.monotonic() < deadline, lab.inside(host, "journalctl", "-u", "google-startup-scripts", "--no-pager")
        time.sleep(0.1)  # polls until the deadline
    return [json.loads(row) for row in rows]


def test_a_startup_script_runs_as_root_at_each_boot_and_reads_metadata_and_a_bucket(desk: Desk) -> None:
    lab = Lab(desk)

    def expected(worker: int) -> dict[str, Any]:
        zone = "projects/1/zones/us-central2-b"
        refused = {"token": 404, "no flavor": 403, "nodes": 404}
        return {"worker": str(worker), "zone": zone, "object": '["content"]', "user": "root", **refused}

    for worker in (0, 1):
        assert results(lab, f"pod-w{worker}", 1) == [expected(worker)]
    journal = ("journalctl", "--no-pager", "-o", "cat", "-u", "google-startup-scripts")
    assert "startup-script: wrote 7 answers" in lab.inside("pod-w0", *journal)
    lab.restart_node("pod")
    assert results(lab, "pod-w1", 2) == [expected(1)] * 2


def test_a_worker_has_no_further_address_through_its_metadata_server(desk: Desk) -> None:
    assert "169.254" not in Lab(desk).inside("pod-w0", "ip", "address", "show")
