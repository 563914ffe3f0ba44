"""What goes into the workers' image, and when it is built anew."""

from __future__ import annotations

import ast
import asyncio
import os
import ssl
import subprocess
from pathlib import Path

import pytest

from tpu_ops.errors import UsageError
from tpu_ops.lab.api.catalogue import RUNTIME_VERSIONS
from tpu_ops.lab.engine import Engine
from tpu_ops.lab.image import bootstrap, build, ca, releases, sources
from tpu_ops.lab.image.sources import Source

BOOKWORM = {"ID": "debian", "VERSION_CODENAME": "bookworm"}
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
DEB822 = f"""\
Types: deb deb-src
# a comment
URIs: http://mirror.example/debian http://second.example/debian
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By: {KEYRING}

Types: deb
URIs: https://tools.example/apt
Suites: bookworm
Components: main
Signed-By: /usr/share/keyrings/tools-archive-keyring.gpg

Enabled: no
Types: deb
URIs: http://off.example/debian
Suites: bookworm
Components: main
"""
ONE_LINE = f"""\
# deb http://commented.example/debian bookworm main
deb http://mirror.example/debian bookworm main # the archive
deb-src http://mirror.example/debian bookworm main
deb [arch=amd64 signed-by={KEYRING}] http://mirror.example/debian-security bookworm-security main
deb https://cloud.example/apt cloud-sdk-bookworm main
deb [trusted=yes] http://engine.example/linux/debian bookworm stable
deb http://mirror.example/debian bookworm-backports main
"""


def test_deb822_sources_are_read() -> None:
    found = sources.parse_deb822(DEB822)
    assert [(source.uri, source.suite) for source in found] == [
        ("http://mirror.example/debian", "bookworm"),
        ("http://mirror.example/debian", "bookworm-updates"),
        ("http://second.example/debian", "bookworm"),
        ("http://second.example/debian", "bookworm-updates"),
        ("https://tools.example/apt", "bookworm"),
    ]
    assert found[0].components == ("main", "contrib")
    assert found[0].signed_by == KEYRING


def test_third_parties_do_not_go_into_the_image() -> None:
    found = sources.of_distribution(sources.parse_deb822(DEB822) + sources.parse_one_line(ONE_LINE), BOOKWORM)
    assert {source.uri.split("/")[2] for source in found} == {"mirror.example", "second.example"}
    assert {source.suite for source in found} == {"bookworm", "bookworm-updates", "bookworm-security"}


def test_a_mirror_that_signs_anew_is_taken_where_there_is_no_other() -> None:
    own = Source("http://inner.example/debian", "bookworm", ("main",), "/etc/apt/keyrings/inner.gpg")
    assert sources.of_distribution([own], BOOKWORM) == [own]


def test_ubuntu_is_read_as_well() -> None:
    text = "deb mirror+file:/nowhere jammy main\ndeb http://mirror.example/ubuntu jammy main restricted universe\n"
    found = sources.of_distribution(sources.parse_one_line(text), {"ID": "ubuntu", "VERSION_CODENAME": "jammy"})
    assert found[1].line() == "deb http://mirror.example/ubuntu jammy main restricted universe"


def test_a_list_of_mirrors_in_a_file_gives_its_first(tmp_path: Path) -> None:
    mirrors = tmp_path / "mirrors.list"
    mirrors.write_text("http://mirror.example/debian priority:1\nhttp://second.example/debian\n")
    (tmp_path / "sources.list").write_text(f"deb mirror+file://{mirrors} bookworm main\n")
    assert sources.read(tmp_path, BOOKWORM) == [Source("http://mirror.example/debian", "bookworm", ("main",))]


def test_a_machine_without_usable_sources_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "sources.list").write_text("deb cdrom:[Debian] bookworm main\n")
    with pytest.raises(UsageError, match="no image registry answers"):
        sources.read(tmp_path, BOOKWORM)


@pytest.mark.parametrize("keyring", ["archive-keyring.pgp", "archive-keyring.gpg"])
def test_another_release_comes_from_the_same_mirror_with_the_same_signatures(tmp_path: Path, keyring: str) -> None:
    for name in ("debian-archive-keyring.gpg", f"debian-{keyring}"):
        (tmp_path / name).touch()
    lines = [
        f"deb [signed-by={tmp_path}/debian-{keyring}] http://mirror.example/{archive} bookworm{part} main contrib\n"
        for archive, part in (("debian", ""), ("debian", "-updates"), ("debian-security", "-security"))
    ]
    (tmp_path / "sources.list").write_text("".join(lines))
    assert sources.of_release(None, tmp_path, BOOKWORM)[0] == "bookworm"
    codename, found = sources.of_release(releases.EXACT["lab-debian13"], tmp_path, BOOKWORM)
    assert codename == "trixie"
    # The older name: Debian 12 has no other.
    signed = f"[signed-by={tmp_path}/debian-archive-keyring.gpg]"
    assert [source.line() for source in found] == [
        f"deb {signed} http://mirror.example/debian trixie main contrib",
        f"deb {signed} http://mirror.example/debian trixie-updates main contrib",
        f"deb {signed} http://mirror.example/debian-security trixie-security main contrib",
    ]


def test_a_release_of_another_distribution_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"library/ubuntu:24\.04, and this machine's own archive has no Ubuntu 24\.04"):
        sources.of_release(releases.EXACT["lab-ubuntu2404"], tmp_path, BOOKWORM)


def test_apt_proxies_go_along_unless_a_container_could_not_reach_them() -> None:
    dump = (
        'Acquire "";\nAcquire::http::Proxy "http://proxy.example:3128";\nAcquire::https::Proxy "http://127.0.0.1:1";\n'
        'Acquire::Retries "3";\n'
    )
    assert sources.apt_settings(dump) == ['Acquire::http::Proxy "http://proxy.example:3128";']


@pytest.mark.parametrize(
    ("runtime", "reference"),
    [
        ("tpu-ubuntu2204-base", "ubuntu:22.04"),
        ("v2-alpha-tpuv6e", "ubuntu:22.04"),
        ("tpu-vm-base", "ubuntu:20.04"),
        ("tpu-vm-tf-2.12.0", "ubuntu:20.04"),
        ("lab-debian13", "debian:13"),
        ("lab-ubuntu2004", "ubuntu:20.04"),
        ("lab-ubuntu2404", "ubuntu:24.04"),
    ],
)
def test_a_runtime_version_asks_for_its_own_release(runtime: str, reference: str) -> None:
    assert releases.of_runtime(runtime).reference.endswith(f"/{reference}")


def test_the_lab_offers_every_release_that_it_knows_as_a_runtime_version() -> None:
    known = {releases.of_runtime(runtime) for runtime in RUNTIME_VERSIONS}
    assert {name for name in RUNTIME_VERSIONS if name.startswith("lab-")} == set(releases.EXACT)
    assert set(releases.EXACT.values()) == known


def test_only_root_calls_mmdebstrap_without_sudo() -> None:
    assert bootstrap.mmdebstrap_command("bookworm", Path("/s"), root=True)[:3] == ["env", "TMPDIR=/s", "mmdebstrap"]
    command = bootstrap.mmdebstrap_command("bookworm", Path("/s"), root=False)
    assert command[:3] == ["sudo", "-n", "env"]
    assert command[-3:] == ["bookworm", "-", "-"]


def test_a_changed_agent_or_bundle_changes_the_worker_and_leaves_the_base() -> None:
    base = bootstrap.base_tag("debian", "bookworm", sources.parse_deb822(DEB822))
    assert base == bootstrap.base_tag("debian", "bookworm", sources.parse_deb822(DEB822))
    assert base != bootstrap.base_tag("debian", "bookworm", sources.parse_one_line(ONE_LINE))
    files = build.worker_files()
    agent, bundle = build.LIBRARY / "guest_agent.py", build.LIBRARY / "controller-ca.pem"
    tags = {
        build.worker_tag(base, files),
        build.worker_tag(base, files | {agent: b"changed"}),
        build.worker_tag(base, files | {bundle: b"changed"}),
        build.worker_tag(base + "x", files),
    }
    assert len(tags) == 4
    assert build.worker_tag(base, files).startswith("tpu-lab-worker:debian-bookworm-")


def test_the_controllers_bundle_is_the_one_that_the_environment_names(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes(b"certificates")
    assert build.controller_ca({"SSL_CERT_FILE": str(bundle)}) == b"certificates"


def test_only_certificates_that_the_distribution_lacks_are_added() -> None:
    first, second = (ssl.DER_cert_to_PEM_cert(der) for der in (b"first certificate", b"second certificate"))
    wrapped = first.replace("\n", "\r\n")
    assert ca.missing(f"# comment\n{first}\n{second}", [wrapped]) == [second.strip()]


FAKE_ENGINE = """\
#!/bin/sh
echo "$@" >>"$FAKE_LOG"
case "$1 $2" in
    "image inspect")
        grep -qx "$3" "$FAKE_IMAGES" || exit 1
        labels='"tpu-ops.lab.image.system": "Ubuntu 22.04", "tpu-ops.lab.image.systemd": "249"'
        echo "[{\\"Config\\": {\\"Labels\\": {$labels}}}]" ;;
    pull*) echo "22.04: Pulling from library/ubuntu"; exit "$FAKE_PULL" ;;
    "run --rm") printf 'Ubuntu 22.04\\nsystemd 249 (249.11)\\n' ;;
    import*) cat >/dev/null; echo sha256:half ;;
    "build --tag") echo "$3" >>"$FAKE_IMAGES" ;;
esac
"""


@pytest.fixture
def fake_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine that only remembers which images it was told to build."""
    path = tmp_path / "engine"
    path.write_text(FAKE_ENGINE)
    path.chmod(0o755)
    for name in ("images", "log"):
        (tmp_path / name).touch()
    monkeypatch.setenv("FAKE_IMAGES", str(tmp_path / "images"))
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("FAKE_PULL", "0")
    monkeypatch.setenv("TPU_OPS_STATE", str(tmp_path / "state"))
    return Engine((str(path),))


async def test_a_registry_is_asked_once_and_the_second_time_builds_nothing(fake_engine: Engine, tmp_path: Path) -> None:
    said: list[str] = []
    first = await build.ensure(fake_engine, "tpu-ubuntu2204-base", said.append)
    assert first.tag.startswith("tpu-lab-worker:ubuntu-22.04-")
    assert first.systemd == 249
    assert any("asking the image registry" in line for line in said)
    said.clear()
    assert await build.ensure(fake_engine, "tpu-ubuntu2204-base", said.append) == first
    assert said == []
    log = (tmp_path / "log").read_text()
    assert log.count("pull ") == 1
    assert log.count("build --tag") == 2
    assert build.describe(fake_engine, "tpu-ubuntu2204-base") == f"Ubuntu 22.04 ({first.tag})"


async def test_a_changed_file_rebuilds_the_top_layer_only(
    fake_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await build.ensure(fake_engine, "tpu-ubuntu2204-base", lambda _line: None)
    changed = build.worker_files() | {build.LIBRARY / "guest_agent.py": b"changed"}
    monkeypatch.setattr(build, "worker_files", lambda: changed)
    (tmp_path / "log").write_text("")
    await build.ensure(fake_engine, "tpu-ubuntu2204-base", lambda _line: None)
    log = (tmp_path / "log").read_text()
    assert "pull " not in log
    assert log.count("build --tag tpu-lab-worker:") == 1
    assert "build --tag tpu-lab-base:" not in log


async def test_without_an_image_registry_the_archive_is_used(
    fake_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_PULL", "1")
    asked: list[str] = []

    async def base(_engine: Engine, release: object, _say: object) -> str:
        asked.append(f"archive of {release}")
        return "tpu-lab-base:debian-bookworm-0123456789ab"

    monkeypatch.setattr(bootstrap, "base", base)
    image = await build.ensure(fake_engine, "tpu-ubuntu2204-base", lambda _line: None)
    await build.ensure(fake_engine, "lab-debian13", lambda _line: None)
    assert asked == ["archive of None", "archive of Debian 13"]
    assert image.tag.startswith("tpu-lab-worker:debian-bookworm-")


async def test_two_builds_at_once_build_once(fake_engine: Engine, tmp_path: Path) -> None:
    both = [build.ensure(fake_engine, "tpu-ubuntu2204-base", lambda _line: None) for _ in range(2)]
    first, second = await asyncio.gather(*both)
    assert first == second
    assert (tmp_path / "log").read_text().count("build --tag tpu-lab-base:") == 1


def test_an_archive_that_breaks_off_leaves_no_image_with_a_name(fake_engine: Engine, tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "mmdebstrap").write_text("#!/bin/sh\necho half\necho 'E: mirror went away' >&2\nexit 1\n")
    (programs / "mmdebstrap").chmod(0o755)
    log = tmp_path / "mmdebstrap.log"
    command = ["env", f"PATH={programs}:{os.environ['PATH']}", "mmdebstrap"]
    with pytest.raises(bootstrap.ImageError, match="mirror went away"):
        asyncio.run(bootstrap._import(fake_engine, command, "", log))
    words = (tmp_path / "log").read_text().split()
    assert "tag" not in words
    assert words[-4:] == ["image", "rm", "-f", "sha256:half"]


def test_the_images_programs_are_fit_for_the_oldest_python() -> None:
    for name in build.PROGRAMS:
        ast.parse((build.HERE / name).read_text(), name, feature_version=(3, 8))


def test_the_images_shell_scripts_parse() -> None:
    for name in ("init", "setup.sh"):
        subprocess.run(["sh", "-n", str(build.HERE / "files" / name)], check=True)
