"""The environment of a run: the sources of its variables, and its ports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar

from tests.support.specs import good, good_net, myself
from tpu_ops.host import environment, fitness
from tpu_ops.protocol import spec
from tpu_ops.protocol.wire import Refused

ROLES = Path(__file__).resolve().parents[2] / "roles"


def test_the_environment_is_built_from_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGASCALE_SLICE_ID", "inherited")
    monkeypatch.setenv("LD_PRELOAD", "inherited")
    asked = good(env={"A": "\udcff", "JAX_PLATFORMS": "mine", "TPU_OPS_RANK": "9"})
    from_host = {"JAX_PLATFORMS": "cpu", "TPU_WORKER_ID": "1", "MEGASCALE_SLICE_ID": ""}
    stale = {"MEGASCALE_NUM_SLICES": "2"}
    env = environment.build(asked, myself(), "/opt/v", from_host | stale, "/files")
    assert env[b"MEGASCALE_SLICE_ID"] == b""
    assert env[b"A"] == b"\xff"
    assert env[b"JAX_PLATFORMS"] == b"mine"
    assert env[b"TPU_WORKER_ID"] == b"1"
    assert env[b"TPU_OPS_RANK"] == b"1"
    assert env[b"PATH"].startswith(b"/opt/v/bin:/usr/local/sbin:")
    expected = {"HOME", "USER", "LOGNAME", "SHELL", "LANG", "PATH", "PYTHONUNBUFFERED", "VIRTUAL_ENV", *from_host, "A"}
    own = {"RUN_ID", "ATTEMPT", "RANK", "WORLD_SIZE", "NODE", "SLICE", "SLICES", "RUN_DIR"}
    assert {name.decode() for name in env} == expected | {f"TPU_OPS_{name}" for name in own}


def test_megascale_variables_come_from_the_current_attempt_only() -> None:
    asked = good(slices=2, rank=2, slice=1, net=good_net(hub="10.0.0.9"), env={"MEGASCALE_NUM_SLICES": "7"})
    stale = {"MEGASCALE_COORDINATOR_ADDRESS": "10.9.9.9", "MEGASCALE_SLICE_ID": "5", "MEGASCALE_PORT": "8081"}
    env = environment.build(spec.check(asked), myself(), "", stale, "/files")
    assert {name: value for name, value in env.items() if name.startswith(b"MEGASCALE")} == {
        b"MEGASCALE_COORDINATOR_ADDRESS": b"10.0.0.9",
        b"MEGASCALE_NUM_SLICES": b"2",
        b"MEGASCALE_SLICE_ID": b"1",
        b"MEGASCALE_PORT": b"8081",
    }


def test_environment_files_keep_empty_values_and_skip_comments() -> None:
    text = "# x=1\nA=\nB='two words'\n C = c=d \n\nnonsense\nD=\"q\"\n"
    assert environment.parse_file(text) == {"A": "", "B": "two words", "C": "c=d", "D": "q"}
    assert environment.parse_file("export A=1\nexport\tB=2\n=x\nC=a\0b\nexportD=3\n") == {
        "A": "1",
        "B": "2",
        "exportD": "3",
    }


def test_a_line_of_an_environment_file_ends_at_its_line_feed_alone(tmp_path: Path) -> None:
    odd = "a\x0cb\x1cc\x85d\u2028e\rf"
    (tmp_path / "env").write_bytes(f"A={odd}\r\nB=2\n".encode())
    assert environment.from_files([str(tmp_path / "env")]) == {"A": odd, "B": "2"}


class Worker:
    """The files with variables on a worker, as the roles keep them: each run of a role goes by what is said then."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        #: What the launcher's configuration names, as of the last run of that role.
        self.named: list[str] = []

    def configure(self, role: str, **said: object) -> None:
        """Apply the files that a role lists, with some variables of the fleet."""
        variables = self.of(role, "defaults") | self.of(role, "vars") | said
        templar = Templar(DataLoader(), variables)
        listed = {"jax": "__jax_run_files", "tcmalloc": "__tcmalloc_run_files", "launcher": "__launcher_files"}[role]
        entries = variables[listed]
        if role == "launcher":  # The others are of a host program, which a controller builds.
            entries = [entry for entry in entries if ".env" in str(entry) or "certificates" in str(entry)]
            self.named = templar.template(variables["__launcher_config"]["environment_files"])
        for entry in templar.template(entries):
            path = self.path(entry["path"])
            path.parent.mkdir(parents=True, exist_ok=True)
            if entry.get("state") == "absent":
                path.unlink(missing_ok=True)
            elif entry.get("state") == "link":
                path.symlink_to(entry["target"])
            elif not (entry.get("once") and path.exists()):
                path.write_text(entry["content"])

    @staticmethod
    def of(role: str, kind: str) -> dict[str, Any]:
        """Return a role's variables of one kind."""
        path = str(ROLES / role / kind / "main.yml")
        return dict(DataLoader().load_from_file(path, trusted_as_template=True))

    def path(self, path: str) -> Path:
        """Return where a path of the worker is."""
        return self.folder / path[1:]

    def run(self) -> dict[str, str]:
        """Return the environment that a training run has here."""
        paths = [str(self.path(path)) for path in self.named]
        faults = fitness.faults(fitness.look({"venv": "", "environment_files": paths}, myself(), "", "/absent"), 0)
        assert [fault["problem"] for fault in faults if fault["check"] == "environment"] == []
        env = environment.build(good(), myself(), "", environment.from_files(paths), "/files")
        return {name.decode(): value.decode() for name, value in env.items()}


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return Worker(tmp_path)


@pytest.mark.parametrize(
    ("said", "device"),
    [
        ({}, None),
        ({"jax_framework": "torch_xla"}, "TPU"),
        ({"jax_framework": "torch_xla", "jax_platform": "cpu"}, "CPU"),
    ],
)
def test_pytorch_xla_gets_its_device_from_the_roles(worker: Worker, said: dict[str, str], device: str | None) -> None:
    """What the role jax writes and the role launcher names, as the host program takes it."""
    mine = worker.path("/etc/tpu_ops/mine")
    mine.parent.mkdir(parents=True)
    mine.write_text("A=1\n")
    worker.configure("jax", **said)
    worker.configure("launcher", launcher_environment_files=["/etc/tpu_ops/mine"], **said)
    found = worker.run()
    assert (found["A"], found.get("PJRT_DEVICE")) == ("1", device)


@pytest.mark.parametrize("pinned", [True, False])
def test_tcmalloc_is_preloaded_where_it_is_pinned_for_runs_and_nowhere_else(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, pinned: bool
) -> None:
    """What the role tcmalloc writes and the role launcher names, as the host program takes it; nothing is inherited."""
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libtcmalloc.so.4")
    worker.configure("tcmalloc", tcmalloc_for_runs=pinned)
    worker.configure("launcher", tcmalloc_for_runs=pinned)
    link = "/usr/local/lib/tpu_ops/libtcmalloc.so"
    assert worker.run().get("LD_PRELOAD") == (link if pinned else None)
    assert worker.path(link).is_symlink() is pinned


def test_a_role_alone_neither_stops_runs_nor_writes_unread_settings(worker: Worker) -> None:
    """The launcher's configuration stays the same and needs no change."""
    worker.configure("launcher")
    assert "PJRT_DEVICE" not in worker.run()
    for framework, device in (("torch_xla", "TPU"), ("jax", None)):
        worker.configure("jax", jax_framework=framework)
        assert worker.run().get("PJRT_DEVICE") == device
    for pinned in (True, False):
        worker.configure("tcmalloc", tcmalloc_for_runs=pinned)
        assert ("LD_PRELOAD" in worker.run()) is pinned
    worker.configure("jax", jax_framework="torch_xla")
    worker.configure("launcher")
    assert worker.run()["PJRT_DEVICE"] == "TPU"


@pytest.mark.parametrize(("trusted", "expected"), [(["proxy.pem"], "/etc/ssl/certs/ca-certificates.crt"), ([], None)])
def test_runs_know_the_certificates_that_logins_know(worker: Worker, trusted: list[str], expected: str | None) -> None:
    """What the role launcher writes and names, as the host program takes it."""
    worker.configure("launcher", base_ca_certificates=trusted)
    assert worker.run().get("SSL_CERT_FILE") == expected


def test_a_missing_environment_file_is_named(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    with pytest.raises(Refused, match=r"absent: No such file") as raised:
        environment.from_files([absent])
    facts = fitness.look({"venv": "", "environment_files": [absent]}, myself(), "", "/absent")
    (fix,) = [fault["fix"] for fault in fitness.faults(facts, 0) if fault["problem"].endswith("absent is missing")]
    assert fix in raised.value.fix
    assert "site.yml" in fix
    assert "launcher_environment_files" in fix


@pytest.mark.parametrize(
    ("ports", "expected"),
    [
        (None, range(8500, 8520)),
        ([9000, 9000], range(9000, 9001)),
        ([8430, 8440], None),
        ([8490, 8500], None),
        ([8000, 8100], None),
        ([32000, 32768], None),
        ([80, 90], None),
        ([9001, 9000], None),
        ([9000], None),
        (["a", "b"], None),
        (9000, None),
    ],
)
def test_the_ports_of_a_run_are_a_small_range_that_nobody_else_uses(
    tmp_path: Path, ports: object, expected: range | None
) -> None:
    path = tmp_path / "launcher.json"
    path.write_text(json.dumps({"ports": ports}))
    if expected is not None:
        assert environment.load_config(str(path))["ports"] == expected
        return
    with pytest.raises(Refused, match=r"launcher\.json"):
        environment.load_config(str(path))


@pytest.mark.parametrize(
    ("text", "port"),
    [(b"8482", 8482), (b"1024", 1024), (b"", None), (b"0", None), (b"x", None), (b"70000", None), (b"1023", None)],
)
def test_the_coordinators_port_is_a_port(text: bytes, port: int | None) -> None:
    assert environment.coordinator_port({}) == 8482
    if port:
        assert environment.coordinator_port({b"JAX_COORDINATOR_PORT": text}) == port
        return
    with pytest.raises(Refused, match="JAX_COORDINATOR_PORT"):
        environment.coordinator_port({b"JAX_COORDINATOR_PORT": text})
