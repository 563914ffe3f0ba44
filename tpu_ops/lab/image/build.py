"""The images of runtime versions, and how they are built.

There are two layers. The tag of each contains a hash of all its inputs, so that existing ones are reused:

- the **base**: a distribution with systemd, sshd, Python and sudo. It is built from the registry's image of the
  release, or without a registry by mmdebstrap from this machine's own Debian or Ubuntu archive.
- the **worker**: guest agent, units, the controller's certificate authorities. It builds in a moment.

By hand: ``python -m tpu_ops.lab.image.build --runtime tpu-ubuntu2204-base``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tpu_ops import files
from tpu_ops.errors import OpsError
from tpu_ops.lab.engine import Engine, EngineError, Result, find
from tpu_ops.lab.image import bootstrap, releases, sources
from tpu_ops.lab.image.bootstrap import BUILD_TIMEOUT, LABEL, PACKAGES, ImageError, Say, digest_of
from tpu_ops.lab.shared import certificate_bundle

HERE = Path(__file__).parent
LIBRARY = Path("usr/local/lib/tpu-lab")
REGISTRY_TIMEOUT = 15.0
#: Python programs of a worker.
PROGRAMS = (
    "guest_agent.py",
    "data_disks.py",
    "chip_watch.py",
    "chip_service.py",
    "metadata_server.py",
    "startup_script.py",
    "ca.py",
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Image:
    """The image that a worker boots from.

    Attributes:
        tag: The image's tag in the engine.
        system: The distribution, as text for users.
        systemd: Major version of its systemd, which determines how it gets its cgroups.
    """

    tag: str
    system: str
    systemd: int


def registry_base_tag(reference: str) -> str:
    """Return the tag of the base image built from a registry's image."""
    name = reference.rsplit("/", 1)[-1].replace(":", "-")
    dockerfile = (HERE / "files" / "base.Dockerfile").read_bytes()
    return f"tpu-lab-base:{name}-{digest_of({'dockerfile': dockerfile, 'packages': ' '.join(PACKAGES)})}"


def controller_ca(environ: Mapping[str, str] = os.environ) -> bytes:
    """Return the controller's certificate authorities; empty if there are none."""
    bundle = certificate_bundle(environ)
    return bundle.read_bytes() if bundle else b""


def worker_files() -> dict[Path, bytes]:
    """Return the files of the worker layer by their path below the image's root."""
    found = {LIBRARY / name: (HERE / name).read_bytes() for name in PROGRAMS}
    for name in ("init", "setup.sh"):
        found[LIBRARY / name] = (HERE / "files" / name).read_bytes()
    for path in sorted((HERE / "files" / "units").iterdir()):
        found[LIBRARY / "units" / path.name] = path.read_bytes()
    found[LIBRARY / "controller-ca.pem"] = controller_ca()
    # Otherwise dpkg would sync after each file. A worker of the lab need not survive a power failure.
    found[Path("etc/dpkg/dpkg.cfg.d/tpu-lab")] = b"force-unsafe-io\n"
    # Translations of the descriptions of packages take a quarter of the time of each refresh of the lists.
    found[Path("etc/apt/apt.conf.d/80tpu-lab")] = b'Acquire::Languages "none";\n'
    if settings := sources.apt_settings():
        found[Path("etc/apt/apt.conf.d/90tpu-lab")] = ("\n".join(settings) + "\n").encode()
    return found


def worker_tag(base: str, files: Mapping[Path, bytes]) -> str:
    """Return the tag of the worker image built from a base image and these files."""
    parts: dict[str, bytes | str] = {str(path): content for path, content in files.items()}
    parts |= {"base": base, "dockerfile": (HERE / "files" / "worker.Dockerfile").read_bytes()}
    system = base.rsplit(":", 1)[1].rsplit("-", 1)[0]
    return f"tpu-lab-worker:{system}-{digest_of(parts)}"


def known_bases(runtime_version: str) -> list[str]:
    """Return the tags of the possible base images of a runtime version, best first."""
    tags = [registry_base_tag(releases.of_runtime(runtime_version).reference)]
    with contextlib.suppress(OpsError, KeyError):
        tags.append(bootstrap.known_tag(releases.EXACT.get(runtime_version)))
    return tags


def describe(engine: Engine, runtime_version: str) -> str:
    """Return a description for users of a runtime version's image, without building anything."""
    files = worker_files()
    for base in known_bases(runtime_version):
        tag = worker_tag(base, files)
        shown = engine.call("image", "inspect", tag, check=False, timeout=20)
        if shown.code == 0:
            return f"{_image(tag, shown).system} ({tag})"
    release = releases.of_runtime(runtime_version)
    other = "the same" if runtime_version in releases.EXACT else "this machine's own release"
    return f"{release.reference}, or {other} from this machine's archive (not built yet)"


async def ensure(engine: Engine, runtime_version: str, say: Say = _log.info) -> Image:
    """Return the worker image of a runtime version; build it if it does not exist.

    Args:
        engine: The container engine.
        runtime_version: The node's runtime version.
        say: Called with progress messages during a build.

    Raises:
        ImageError: The image could not be built; the error quotes the output.
        UsageError: There is neither a registry nor a usable apt source.
    """
    files = worker_files()
    for base in known_bases(runtime_version):
        if image := await _there(engine, worker_tag(base, files)):
            return image
    async with _build_lock(say):
        base = await _ensure_base(engine, runtime_version, say)
        tag = worker_tag(base, files)
        return await _there(engine, tag) or await _build_worker(engine, base, tag, files, say)


async def _there(engine: Engine, tag: str) -> Image | None:
    shown = await engine.run("image", "inspect", tag, check=False)
    return _image(tag, shown) if shown.code == 0 else None


def _image(tag: str, shown: Result) -> Image:
    labels = json.loads(shown.stdout)[0]["Config"].get("Labels") or {}
    return Image(tag, labels.get(f"{LABEL}.system", ""), int(labels.get(f"{LABEL}.systemd", "0")))


@contextlib.asynccontextmanager
async def _build_lock(say: Say) -> AsyncIterator[None]:
    """Serialize builds; the lock is released with the process that holds it."""
    path = files.state_root() / "lab" / "image.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        deadline, told = asyncio.get_running_loop().time() + BUILD_TIMEOUT, False
        while not files.take(handle.fileno()):
            if asyncio.get_running_loop().time() > deadline:
                raise ImageError(
                    f"another build of the worker image has not ended for {BUILD_TIMEOUT:.0f} s", where=str(path)
                )
            if not told:
                say("waiting for another process that builds the worker image")
                told = True
            await asyncio.sleep(0.2)  # polls the lock until the deadline
        yield


async def _ensure_base(engine: Engine, runtime_version: str, say: Say) -> str:
    """Return the tag of a base image: an existing one, else from the registry, else from this machine's archive."""
    for tag in known_bases(runtime_version):
        if (await engine.run("image", "inspect", tag, check=False)).code == 0:
            return tag
    reference = releases.of_runtime(runtime_version).reference
    if await _pull(engine, reference, say):
        tag = registry_base_tag(reference)
        say(f"building the base image from {reference}")
        with tempfile.TemporaryDirectory(prefix="tpu-lab-image-") as folder:
            shutil.copy(HERE / "files" / "base.Dockerfile", Path(folder) / "Dockerfile")
            arguments = {"BASE": reference, "PACKAGES": " ".join(PACKAGES)}
            await _build(engine, Path(folder), tag, arguments, network="host", labels={LABEL: "base"})
        return tag
    return await bootstrap.base(engine, releases.EXACT.get(runtime_version), say)


async def _pull(engine: Engine, reference: str, say: Say) -> bool:
    """Return whether a registry delivered the image; one that does not answer is given up after a short time."""
    say(f"asking the image registry for {reference}")
    process = await asyncio.create_subprocess_exec(
        *engine.command,
        "pull",
        reference,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    last, limit = "no answer", REGISTRY_TIMEOUT
    try:
        while line := await asyncio.wait_for(process.stdout.readline(), limit):  # type: ignore[union-attr] # it is a pipe
            last = line.decode(errors="replace").strip()
            if not last.startswith("Trying to pull"):
                limit = 120.0
        await asyncio.wait_for(process.wait(), limit)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    if process.returncode == 0:
        return True
    say(f"no image registry: {last}")
    return False


async def _build_worker(engine: Engine, base: str, tag: str, files: Mapping[Path, bytes], say: Say) -> Image:
    say(f"building the worker image on {base}")
    script = '. /etc/os-release; echo "$PRETTY_NAME"; systemctl --version'
    lines = (
        await engine.run("run", "--rm", "--network=none", "--entrypoint=sh", base, "-c", script)
    ).stdout.splitlines()
    labels = {LABEL: "worker", f"{LABEL}.system": lines[0], f"{LABEL}.systemd": lines[1].split()[1].split(".")[0]}
    with tempfile.TemporaryDirectory(prefix="tpu-lab-image-") as folder:
        for path, content in files.items():
            target = Path(folder) / "root" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        shutil.copy(HERE / "files" / "worker.Dockerfile", Path(folder) / "Dockerfile")
        await _build(engine, Path(folder), tag, {"BASE": base}, network="none", labels=labels)
    image = await _there(engine, tag)
    if image is None:
        raise ImageError(f"{engine.name} built the worker image, but it is missing", where=tag)
    return image


async def _build(
    engine: Engine,
    folder: Path,
    tag: str,
    arguments: Mapping[str, str],
    *,
    network: str,
    labels: Mapping[str, str],
) -> None:
    """Build a directory's Dockerfile under a tag."""
    command = ["build", "--tag", tag, "--network", network]
    for name, value in arguments.items():
        command += ["--build-arg", f"{name}={value}"]
    for name, value in labels.items():
        command += ["--label", f"{name}={value}"]
    try:
        done = await engine.run(*command, str(folder), timeout=BUILD_TIMEOUT, check=False)
    except EngineError as exc:
        raise ImageError(exc.what, where=tag, fix=exc.fix) from exc
    if done.code:
        tail = " / ".join((done.stdout + done.stderr).strip().splitlines()[-5:])
        raise ImageError(
            f"the image could not be built: {tail}", where=tag, fix="correct what it names, then run this again"
        )


def main() -> int:
    """Build the image of one runtime version by hand and print its tag."""
    parser = argparse.ArgumentParser(prog="python -m tpu_ops.lab.image.build", description=main.__doc__)
    parser.add_argument("--runtime", default="tpu-ubuntu2204-base", help="runtime version (default: %(default)s)")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        image = asyncio.run(ensure(find(), args.runtime))
    except OpsError as exc:
        _log.error("error: %s", exc)
        return int(exc.exit_code)
    sys.stdout.write(f"{image.tag}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
