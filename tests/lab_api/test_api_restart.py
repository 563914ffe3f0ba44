"""What survives the end of the API process, and which states of the world it refuses to start in."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.lab_api import LOCATION, PATIENCE, LabApi

NODE = {"acceleratorType": "v4-8", "runtimeVersion": "tpu-ubuntu2204-base"}


def begin(api: LabApi, method: str, path: str, body: Any = None) -> str:
    """Begin an operation and return its name."""
    status, operation = api.call(method, f"v2/{LOCATION}/{path}", body)
    assert status == 200, operation
    return str(operation["name"])


def ended(api: LabApi, operation: str) -> Any:
    """Return an operation once it has ended."""
    answer = api.call("POST", f"v2/{operation}:wait", {"timeout": f"{PATIENCE}s"})[1]
    assert answer.get("done"), answer
    return answer


def external(node: Any) -> list[str]:
    return [
        endpoint["accessConfig"]["externalIp"] for endpoint in node["networkEndpoints"] if "accessConfig" in endpoint
    ]


def test_everything_survives_an_orderly_end_and_a_kill(lab_api: LabApi) -> None:
    """Operations hang in mid-air while each is in the state that only it has; none is lost by kill -9."""
    for node in ("stops", "starts", "goes", "stays", "changes"):
        lab_api.create(node)
    lab_api.done("POST", f"v2/{LOCATION}/nodes/starts:stop", {})
    before = {node["name"]: node for node in lab_api.call("GET", f"v2/{LOCATION}/nodes")[1]["nodes"]}

    lab_api.seconds = 60
    lab_api.restart()
    assert {node["name"]: node for node in lab_api.call("GET", f"v2/{LOCATION}/nodes")[1]["nodes"]} == before
    spec = {"nodeId": "queued", "node": NODE}
    operations = [
        begin(lab_api, "POST", "nodes?nodeId=new", NODE),
        begin(lab_api, "POST", "nodes/stops:stop", {}),
        begin(lab_api, "POST", "nodes/starts:start", {}),
        begin(lab_api, "DELETE", "nodes/goes"),
        begin(lab_api, "PATCH", "nodes/changes?updateMask=labels", {"labels": {"a": "b"}}),
        begin(lab_api, "POST", "queuedResources?queuedResourceId=q", {"tpu": {"nodeSpec": [spec]}}),
    ]
    underway = {"new": "CREATING", "stops": "STOPPING", "starts": "STARTING", "goes": "DELETING", "stays": "READY"}
    assert {node: lab_api.node(node)["state"] for node in underway} == underway
    assert "networkEndpoints" not in lab_api.node("new")
    assert lab_api.call("GET", f"v2/{LOCATION}/queuedResources/q")[1]["state"]["state"] == "CREATING"
    assert not any(lab_api.call("GET", f"v2/{name}")[1].get("done") for name in operations)
    assert not lab_api.call("POST", f"v2/{operations[0]}:wait", {"timeout": "0.05s"})[1].get("done")
    for node, action in (("new", "stop"), ("new", "start"), ("stops", "stop"), ("starts", "start"), ("goes", "stop")):
        status, refused = lab_api.call("POST", f"v2/{LOCATION}/nodes/{node}:{action}", {})
        assert (status, refused["error"]["status"]) == (400, "FAILED_PRECONDITION")
    assert lab_api.call("DELETE", f"v2/{LOCATION}/nodes/goes")[0] == 400

    lab_api.kill()
    lab_api.seconds = 0.05
    lab_api.restart()
    results = [ended(lab_api, name) for name in operations]
    assert [result.get("error") for result in results] == [None] * len(operations)
    assert {node: lab_api.node(node)["state"] for node in ("new", "stops", "starts", "stays")} == {
        "new": "READY",
        "stops": "STOPPED",
        "starts": "READY",
        "stays": "READY",
    }
    assert lab_api.call("GET", f"v2/{LOCATION}/nodes/goes")[0] == 404
    assert lab_api.node("changes")["labels"] == {"a": "b"}
    deadline = time.monotonic() + PATIENCE
    while lab_api.call("GET", f"v2/{LOCATION}/queuedResources/q")[1]["state"]["state"] != "ACTIVE":
        assert time.monotonic() < deadline
        time.sleep(0.01)  # polls until the deadline
    assert lab_api.node("queued")["state"] == "READY"

    # Addresses that were given before the kill are not given again.
    given = {address for node in before.values() for address in external(node)}
    assert not given & set(external(lab_api.create("late")))
    assert lab_api.stop() == 0


def refusal(api: LabApi, *options: str) -> list[str]:
    """Start the API where it cannot, and return the lines of its message."""
    done = subprocess.run([*api.command(), *options], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()


@pytest.mark.parametrize("content", ['{"format": "tpu-ops-lab-api", "nod', '{"some": "other file"}'])
def test_a_file_that_is_no_state_is_refused_and_left_alone(tmp_path: Path, content: str) -> None:
    api = LabApi(tmp_path / "state.json")
    api.state.write_text(content)
    message = refusal(api)
    assert "cannot use the state file" in message[0]
    assert str(api.state) in message[1]
    assert "--state" in message[2]
    assert api.state.read_text() == content


def test_a_state_is_served_by_one_process_only(shared_api: LabApi, unique: str) -> None:
    shared_api.create(unique)
    assert "another process of the lab's API uses this state file" in refusal(shared_api)[0]
    assert shared_api.node(unique)["state"] == "READY"


def test_a_stop_right_after_the_start_exits_with_0(tmp_path: Path) -> None:
    api = LabApi(tmp_path / "state.json")
    for _ in range(3):
        api.start()
        assert api.stop() == 0


@pytest.mark.parametrize("option", ["--grpc-port", "--rest-port"])
def test_a_port_in_use_is_named(tmp_path: Path, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        message = refusal(LabApi(tmp_path / "state.json"), option, port)
    assert f"port {port}" in message[0]
    assert option in message[2]


@pytest.mark.parametrize(
    "options",
    [("--seconds", "-1"), ("--seconds", "nan"), ("--seconds", "inf"), ("--seconds", "soon"), ("--projects", ",")],
)
def test_wrong_options_are_refused(tmp_path: Path, options: tuple[str, str]) -> None:
    assert options[0] in refusal(LabApi(tmp_path / "state.json"), *options)[-1]


def test_an_unwritable_state_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = refusal(LabApi(tmp_path / "file" / "state.json"))
    assert "cannot use the state file" in message[0]


def test_the_api_listens_on_loopback_only(shared_api: LabApi) -> None:
    ports = {int(where.rsplit(":", 1)[1]) for where in (shared_api.grpc, shared_api.rest)}
    found: dict[int, str] = {}
    for line in [line for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]:
        address, port = line.split()[1].split(":")
        if line.split()[3] == "0A" and int(port, 16) in ports:
            found[int(port, 16)] = address
    # 127.0.0.1, or the same mapped into IPv6, as the kernel writes them.
    assert found.keys() == ports
    assert set(found.values()) <= {"0100007F", "0000000000000000FFFF00000100007F"}


def test_the_state_after_a_request_is_in_one_json_file(shared_api: LabApi, unique: str) -> None:
    node = shared_api.create(unique)
    data = json.loads(shared_api.state.read_text())
    assert (data["format"], data["version"]) == ("tpu-ops-lab-api", 1)
    assert node["name"] in [entry["name"] for entry in data["nodes"]]
    kept = {path.name for path in shared_api.state.parent.iterdir()} - {"state.json.new"}
    assert kept == {"state.json", "state.json.lock"}
