"""The lab's API as a real process, for any test that needs a fleet without containers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

#: Longest time that any operation of the lab's API may take in a test.
PATIENCE = 10.0
LOCATION = "projects/lab/locations/us-central2-b"


class LabApi:
    """One API process on free ports over one state file.

    Attributes:
        grpc: ``host:port``.
        rest: ``http://host:port``.
        state: The state file.
        seconds: Shortest time of an operation; what is set here holds from the next start on.
    """

    def __init__(self, state: Path, *, seconds: float = 0.05, projects: str = "lab,other") -> None:
        self.state = state
        self.seconds = seconds
        self.projects = projects
        self._process: subprocess.Popen[str] | None = None
        self.grpc = self.rest = ""

    def command(self) -> list[str]:
        """Return the command line of the process."""
        options = ["--grpc-port", "0", "--rest-port", "0", "--seconds", str(self.seconds), "--projects", self.projects]
        return [sys.executable, "-m", "tpu_ops.lab.api", "--state", str(self.state), *options]

    def start(self) -> None:
        """Start the process and wait until it serves."""
        self._process = subprocess.Popen(self.command(), stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the lab's API ended with {self._process.wait(PATIENCE)}"
        where = json.loads(line)
        self.grpc, self.rest = where["grpc"], where["rest"]

    def processor_time(self) -> float:
        """Return the seconds of processor time that the process has taken: other processes do not add to them."""
        assert self._process is not None
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> int:
        """End the process in order and return its exit code."""
        return self._end("terminate")

    def kill(self) -> None:
        """End the process with SIGKILL."""
        self._end("kill")

    def restart(self) -> None:
        """Start a new process over the same state, on new ports; the old one is ended in order if it still runs."""
        self.close()
        self.start()

    def close(self) -> None:
        """End the process in order if it still runs."""
        if self._process is not None:
            self.stop()

    def _end(self, how: str) -> int:
        assert self._process is not None
        assert self._process.stdout is not None
        getattr(self._process, how)()
        code = self._process.wait(PATIENCE)
        self._process.stdout.close()
        self._process = None
        return code

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Send one REST request and return the status and the parsed answer."""
        request = urllib.request.Request(  # noqa: S310 - always the loopback address of this process
            f"{self.rest}/{path.lstrip('/')}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            # An opener of its own: the shared one takes the proxy of whichever test was the first to use it.
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=PATIENCE) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as failure:
            with failure:
                return failure.code, json.load(failure)

    def done(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request that begins an operation, wait for its end, and return the operation."""
        status, operation = self.call(method, path, body)
        assert status == 200, operation
        status, ended = self.call("POST", f"v2/{operation['name']}:wait", {"timeout": f"{PATIENCE}s"})
        assert (status, ended.get("done")) == (200, True), ended
        return ended

    def create(self, node: str, accelerator_type: str = "v4-8", location: str = LOCATION, **fields: Any) -> Any:
        """Create a node and return it when it is READY."""
        body = {"acceleratorType": accelerator_type, "runtimeVersion": "tpu-ubuntu2204-base", **fields}
        operation = self.done("POST", f"v2/{location}/nodes?nodeId={node}", body)
        assert "error" not in operation, operation
        return operation["response"]

    def node(self, node: str, location: str = LOCATION) -> Any:
        """Return a node as REST gives it."""
        status, found = self.call("GET", f"v2/{location}/nodes/{node}")
        assert status == 200, found
        return found

    def fault(self, **fields: Any) -> None:
        """Have requests fail as docs/lab.md says: method, project, zone, code, message, times, seconds, unreachable."""
        status, answer = self.call("POST", "lab/faults", fields)
        assert status == 200, answer

    def clear_faults(self) -> None:
        """Let every request succeed again that would without faults."""
        assert self.call("DELETE", "lab/faults")[0] == 200

    def requests(self, project: str = "") -> dict[str, int]:
        """Return how many requests each method has had since they were last forgotten, those of one project or all."""
        counts = self.call("GET", "lab/requests")[1]
        found: dict[str, int] = counts["projects"].get(project, {}) if project else counts["methods"]
        return found

    def forget_requests(self) -> None:
        """Count requests from nothing again."""
        assert self.call("DELETE", "lab/requests")[0] == 200


@pytest.fixture
def lab_api(tmp_path: Path) -> Iterator[LabApi]:
    """A lab API of its own, empty, with operations that take 50 ms; projects ``lab`` and ``other``."""
    api = LabApi(tmp_path / "lab" / "state.json")
    api.start()
    yield api
    api.close()
