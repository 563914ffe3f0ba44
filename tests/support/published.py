"""Published snapshots, and members of a fleet, who read them: people with an ssh key and no way to the API."""

from __future__ import annotations

import http.server
import os
import ssl
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.support.nodes import key, node
from tpu_ops import config
from tpu_ops.cloud.node import Node
from tpu_ops.config import Settings
from tpu_ops.fleet.publishing import documents
from tpu_ops.ssh.known_hosts import Keys

#: When the snapshots of these tests are of.
NOW = 1_790_000_000.0

POD = node(
    labels={"team": "vision", "note": "two\nlines {{ 7 }}"},
    symptoms=({"worker_id": "1", "type": "LOW_MEMORY", "details": "a\nb", "create_time": ""},),
    data_disks=({"source": "projects/lab/zones/z/disks/data", "mode": "READ_ONLY"},),
    runtime_version="tpu-ubuntu2204-base",
    service_account="1-compute@developer.gserviceaccount.com",
    metadata_keys=("ssh-keys",),
    instance_names=("t1v-n-1-w-0", ""),
    health="HEALTHY",
    chips=8,
)
SOLO = node("solo", node_id="2", count=1, project="other", zone="us-west4-a", external_ips=(), state="PREEMPTED")
KEYS = {
    "tpu-1-w0": {"ssh-ed25519": key("a"), "ssh-rsa": key("r", "ssh-rsa")},
    "tpu-1-w1": {"ssh-ed25519": key("b")},
    "tpu-2-w0": {"ssh-ed25519": key("c")},
}


def document(
    nodes: Sequence[Node] = (POD, SOLO), keys: Mapping[str, Keys] = KEYS, asked_at: float = NOW
) -> documents.Document:
    """Return the published snapshot of some nodes."""
    return documents.document(asked_at, ("lab", "other"), (), tuple(nodes), keys)


def text(nodes: Sequence[Node] = (POD, SOLO), keys: Mapping[str, Keys] = KEYS, asked_at: float = NOW) -> str:
    """Return the same as text."""
    return document(nodes, keys, asked_at).text()


class Member:
    """A person who reads what others publish.

    Args:
        root: A directory for home and fleet.
        options: Keys of the fleet's file.

    Attributes:
        path: The fleet directory.
        home: The home directory.
        published: A snapshot that was published for them.
    """

    published: Path

    def __init__(self, root: Path, **options: Any) -> None:
        self.path, self.home = root / "fleet", root / "home"
        self.key = self.home / ".ssh" / "id_ed25519"
        (self.path / "inventory").mkdir(parents=True)
        self.key.parent.mkdir(parents=True, mode=0o700)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.key], check=True)
        self.write(**options)

    @property
    def file(self) -> Path:
        """The fleet's file."""
        return self.path / "inventory" / "tpu_vm.yml"

    def write(self, **options: Any) -> None:
        """Write the fleet's file."""
        self.file.write_text(yaml.safe_dump({"plugin": "tpu_vm", "user": "ada"} | options))

    def environ(self, **more: str) -> dict[str, str]:
        """Return the environment of the member's shell: no endpoint, and credentials that do not exist."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("TPU_OPS_", "CLOUDSDK_"))}
        own = {
            "HOME": str(self.home),
            "TPU_OPS_STATE": str(self.home / "state"),
            "TPU_OPS_FLEET": str(self.path),
            "GOOGLE_APPLICATION_CREDENTIALS": str(self.home / "void.json"),
            "XDG_RUNTIME_DIR": str(self.home / "run"),
        }
        return kept | own | more

    def settings(self, **more: str) -> Settings:
        """Return the fleet's settings as the member's commands see them."""
        return config.from_data(config.read_file(self.file), self.file, self.environ(**more))


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers with what the server was given for a path: (status, headers, body)."""

    def do_GET(self) -> None:
        answers: dict[str, tuple[int, dict[str, str], bytes]] = self.server.answers  # type: ignore[attr-defined]
        status, headers, body = answers.get(self.path.partition("?")[0], (404, {}, b""))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def web(answers: dict[str, tuple[int, dict[str, str], bytes]], certificate: Path | None = None) -> Iterator[str]:
    """Serve some answers on loopback for as long as the block lasts; yield the address, without a final slash."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.answers = answers  # type: ignore[attr-defined]
    scheme = "http"
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, certificate.with_suffix(".key"))
        server.socket = context.wrap_socket(server.socket, server_side=True)
        scheme = "https"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"{scheme}://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def certificate(folder: Path) -> Path:
    """Make a certificate for 127.0.0.1 that signs itself; its key lies beside it."""
    path = folder / "server.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    command += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(path.with_suffix(".key")), "-out", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    return path
