"""The environment of a run: whence its variables come, and the ports that are its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jinja2.nativetypes import NativeEnvironment

from tests.support.specs import good, good_net, myself
from tpu_ops.host import environment, spec
from tpu_ops.host.wire import Refused

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


def test_slices_of_one_run_are_told_how_to_find_each_other_by_this_attempt_alone() -> None:
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


def test_a_line_of_an_environment_file_ends_at_its_line_feed_alone(tmp_path: Path) -> None:
    odd = "a\x0cb\x1cc\x85d\u2028e\rf"
    (tmp_path / "env").write_bytes(f"A={odd}\r\nB=2\n".encode())
    assert environment.from_files([str(tmp_path / "env")]) == {"A": odd, "B": "2"}


def rendered(template: str, **variables: object) -> Any:
    return NativeEnvironment().from_string(template).render(**variables)


@pytest.mark.parametrize(
    ("variables", "names", "expected"),
    [
        ({}, ["mine"], {"A": "1"}),
        ({"jax_framework": "torch_xla"}, ["jax.env", "mine"], {"A": "1", "PJRT_DEVICE": "TPU"}),
        ({"jax_framework": "torch_xla", "jax_platform": "cpu"}, ["jax.env", "mine"], {"A": "1", "PJRT_DEVICE": "CPU"}),
    ],
)
def test_pytorch_xla_gets_its_device_from_the_roles(
    tmp_path: Path, variables: dict[str, str], names: list[str], expected: dict[str, str]
) -> None:
    """What the role jax writes and the role launcher names, as the host program takes it."""
    defaults = yaml.safe_load((ROLES / "jax/defaults/main.yml").read_text()) | variables
    for entry in yaml.safe_load((ROLES / "jax/vars/main.yml").read_text())["__jax_run_files"]:
        if rendered(entry["state"], **defaults) == "file":
            path = tmp_path / entry["path"][1:]
            path.parent.mkdir(parents=True)
            path.write_text(rendered(entry["content"], **defaults))
    mine = tmp_path / "etc/tpu_ops/mine"
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_text("A=1\n")
    config = yaml.safe_load((ROLES / "launcher/vars/main.yml").read_text())["__launcher_config"]
    named = rendered(config["environment_files"], launcher_environment_files=["/etc/tpu_ops/mine"], **variables)
    paths = [f"{tmp_path}{path}" for path in named]
    assert [Path(path).name for path in paths] == names
    found = environment.build(good(), myself(), "", environment.from_files(paths), "/files")
    assert {name: found[name.encode()].decode() for name in ("A", "PJRT_DEVICE") if name.encode() in found} == expected


@pytest.mark.parametrize("pinned", [True, False])
def test_tcmalloc_is_preloaded_where_it_is_pinned_for_runs_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pinned: bool
) -> None:
    """What the role tcmalloc writes and the role launcher names, as the host program takes it; nothing is inherited."""
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libtcmalloc.so.4")
    written = yaml.safe_load((ROLES / "tcmalloc/vars/main.yml").read_text())["__tcmalloc_run_files"]
    for entry in written:
        if "content" in entry:
            path = tmp_path / entry["path"][1:]
            path.parent.mkdir(parents=True)
            path.write_text(entry["content"])
    config = yaml.safe_load((ROLES / "launcher/vars/main.yml").read_text())["__launcher_config"]
    named = rendered(config["environment_files"], launcher_environment_files=[], tcmalloc_for_runs=pinned)
    from_host = environment.from_files([f"{tmp_path}{path}" for path in named])
    env = environment.build(good(), myself(), "", from_host, "/files")
    link = next(entry["path"] for entry in written if entry.get("state") == "link")
    assert env.get(b"LD_PRELOAD") == (link.encode() if pinned else None)


@pytest.mark.parametrize(("trusted", "expected"), [(["proxy.pem"], "/etc/ssl/certs/ca-certificates.crt"), ([], None)])
def test_runs_know_the_certificates_that_logins_know(tmp_path: Path, trusted: list[str], expected: str | None) -> None:
    """What the role launcher writes and names, as the host program takes it."""
    launcher = yaml.safe_load((ROLES / "launcher/vars/main.yml").read_text())
    written = launcher["__launcher_certificates"]
    assert "{{ __launcher_certificates }}" in launcher["__launcher_files"]
    path = tmp_path / written["path"][1:]
    path.parent.mkdir(parents=True)
    path.write_text(rendered(written["content"], __launcher_mark=launcher["__launcher_mark"]))
    template = launcher["__launcher_config"]["environment_files"]
    named = rendered(template, launcher_environment_files=[], base_ca_certificates=trusted)
    from_host = environment.from_files([f"{tmp_path}{path}" for path in named])
    found = environment.build(good(), myself(), "", from_host, "/files").get(b"SSL_CERT_FILE")
    assert found == (expected and expected.encode())


def test_a_missing_environment_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"absent: No such file"):
        environment.from_files([str(tmp_path / "absent")])


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


@pytest.mark.parametrize(("text", "port"), [(b"8482", 8482), (b"", None), (b"0", None), (b"x", None), (b"70000", None)])
def test_the_coordinators_port_is_a_port(text: bytes, port: int | None) -> None:
    assert environment.coordinator_port({}) == 8482
    if port:
        assert environment.coordinator_port({b"JAX_COORDINATOR_PORT": text}) == port
        return
    with pytest.raises(Refused, match="JAX_COORDINATOR_PORT"):
        environment.coordinator_port({b"JAX_COORDINATOR_PORT": text})
