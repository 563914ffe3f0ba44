"""Which image stands behind a runtime version, and how it is built.

Two layers, each tagged with a hash of everything that goes into it, so that the second time is instant:

- the **base**: a distribution with systemd, sshd, Python and sudo. From ``ubuntu:22.04`` (or ``20.04``) where an image
  registry answers, else made by mmdebstrap from this machine's own Debian or Ubuntu archive. Made once.
- the **worker**: guest agent, units, the controller's certificate authorities. Cheap.

By hand: ``python -m tpu_ops.lab.image.build --runtime tpu-ubuntu2204-base``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tpu_ops.errors import OpsError
from tpu_ops.lab.engine import Engine, EngineError, Result, find, last_line
from tpu_ops.lab.image import sources
from tpu_ops.lab.instance import state_root

LABEL = "tpu-ops.lab.image"
HERE = Path(__file__).parent
LIBRARY = Path("usr/local/lib/tpu-lab")
#: What every worker has from its first boot, as a TPU VM's image has; all else is for the roles to install.
PACKAGES = (
    "ca-certificates curl dbus gnupg iproute2 iputils-ping libpam-systemd netbase openssh-client openssh-server passwd "
    "procps psmisc python3 python3-apt python3-venv rsync sudo systemd systemd-sysv tar tzdata xz-utils"
).split()
#: Where mmdebstrap leaves files out that no worker reads.
EXCLUDED = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/info/*")
BASE_TIMEOUT = 900.0
REGISTRY_TIMEOUT = 15.0

Say = Callable[[str], None]
_log = logging.getLogger(__name__)


class ImageError(OpsError):
    """The image of a runtime version could not be built."""


@dataclass(frozen=True)
class Image:
    """What a worker boots from.

    Attributes:
        tag: The image's name for the engine.
        system: The distribution, for people.
        systemd: Major version of its systemd, which decides how it is given its cgroups.
    """

    tag: str
    system: str
    systemd: int


def registry_reference(runtime_version: str) -> str:
    """Return the registry's image that is nearest to a runtime version (FACTS: tpu-vm-* are Ubuntu 20.04)."""
    release = "20.04" if runtime_version.startswith("tpu-vm-") else "22.04"
    return f"docker.io/library/ubuntu:{release}"


def digest_of(parts: Mapping[str, bytes | str]) -> str:
    """Return 12 hexadecimal digits that name exactly these parts."""
    total = hashlib.sha256()
    for name in sorted(parts):
        value = parts[name]
        content = value.encode() if isinstance(value, str) else value
        total.update(f"{len(name)}:{name}:{len(content)}:".encode() + content)
    return total.hexdigest()[:12]


def registry_base_tag(reference: str) -> str:
    """Return the tag of the base made from a registry's image."""
    name = reference.rsplit("/", 1)[-1].replace(":", "-")
    dockerfile = (HERE / "files" / "base.Dockerfile").read_bytes()
    return f"tpu-lab-base:{name}-{digest_of({'dockerfile': dockerfile, 'packages': ' '.join(PACKAGES)})}"


def archive_base_tag(release: Mapping[str, str], found: list[sources.Source]) -> str:
    """Return the tag of the base made from this machine's archive."""
    lines = "\n".join(source.line() + source.signed_by for source in found)
    parts = {"sources": lines, "packages": " ".join(PACKAGES), "excluded": " ".join(EXCLUDED)}
    return f"tpu-lab-base:{release['ID']}-{release['VERSION_CODENAME']}-{digest_of(parts)}"


def controller_ca(environ: Mapping[str, str] = os.environ) -> bytes:
    """Return the controller's bundle of certificate authorities; empty where it has none."""
    for name in (environ.get("SSL_CERT_FILE"), "/etc/ssl/certs/ca-certificates.crt"):
        if name and Path(name).is_file():
            return Path(name).read_bytes()
    return b""


def worker_files() -> dict[Path, bytes]:
    """Return the files that make a base a worker, by their path below the image's root."""
    found = {LIBRARY / name: (HERE / name).read_bytes() for name in ("guest_agent.py", "ca.py")}
    for name in ("init", "setup.sh"):
        found[LIBRARY / name] = (HERE / "files" / name).read_bytes()
    for path in sorted((HERE / "files" / "units").iterdir()):
        found[LIBRARY / "units" / path.name] = path.read_bytes()
    found[LIBRARY / "controller-ca.pem"] = controller_ca()
    if settings := sources.apt_settings():
        found[Path("etc/apt/apt.conf.d/90tpu-lab")] = ("\n".join(settings) + "\n").encode()
    return found


def worker_tag(base: str, files: Mapping[Path, bytes]) -> str:
    """Return the tag of the worker made from a base and these files."""
    parts: dict[str, bytes | str] = {str(path): content for path, content in files.items()}
    parts |= {"base": base, "dockerfile": (HERE / "files" / "worker.Dockerfile").read_bytes()}
    system = base.rsplit(":", 1)[1].rsplit("-", 1)[0]
    return f"tpu-lab-worker:{system}-{digest_of(parts)}"


def known_bases(runtime_version: str) -> list[str]:
    """Return the tags of the bases that may stand behind a runtime version, best first."""
    tags = [registry_base_tag(registry_reference(runtime_version))]
    with contextlib.suppress(OpsError, KeyError):
        tags.append(archive_base_tag(sources.read_os_release(), sources.read()))
    return tags


def describe(engine: Engine, runtime_version: str) -> str:
    """Return what stands behind a runtime version, for people, without building anything."""
    files = worker_files()
    for base in known_bases(runtime_version):
        tag = worker_tag(base, files)
        shown = engine.call("image", "inspect", tag, check=False, timeout=20)
        if shown.code == 0:
            return f"{_image(tag, shown).system} ({tag})"
    return f"{registry_reference(runtime_version)}, or this machine's own distribution (not built yet)"


async def ensure(engine: Engine, runtime_version: str, say: Say = _log.info) -> Image:
    """Return the worker image behind a runtime version, built unless it is there.

    Args:
        engine: The container engine.
        runtime_version: The node's runtime version.
        say: Told what goes on, line by line, while anything is built.

    Raises:
        ImageError: It could not be built; the error quotes what failed.
        UsageError: Neither a registry nor a usable apt source is there.
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
async def _build_lock(say: Say, timeout: float = BASE_TIMEOUT) -> AsyncIterator[None]:
    """Let one build run at a time; the lock falls with the process that holds it."""
    path = state_root() / "lab" / "image.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        deadline, told = asyncio.get_running_loop().time() + timeout, False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if asyncio.get_running_loop().time() > deadline:
                    raise ImageError(
                        f"another build of the worker image has not ended for {timeout:.0f} s", where=str(path)
                    ) from None
                if not told:
                    say("waiting for another process that builds the worker image")
                    told = True
                await asyncio.sleep(0.2)  # polls the lock until the deadline
        yield


async def _ensure_base(engine: Engine, runtime_version: str, say: Say) -> str:
    """Return the tag of a base image: one that is there, else the registry's, else one from this machine's archive."""
    for tag in known_bases(runtime_version):
        if (await engine.run("image", "inspect", tag, check=False)).code == 0:
            return tag
    reference = registry_reference(runtime_version)
    if await _pull(engine, reference, say):
        tag = registry_base_tag(reference)
        say(f"building the base image from {reference}")
        with tempfile.TemporaryDirectory(prefix="tpu-lab-image-") as folder:
            shutil.copy(HERE / "files" / "base.Dockerfile", Path(folder) / "Dockerfile")
            arguments = {"BASE": reference, "PACKAGES": " ".join(PACKAGES)}
            await _build(engine, Path(folder), tag, arguments, "host")
        return tag
    return await _bootstrap(engine, say)


async def _pull(engine: Engine, reference: str, say: Say) -> bool:
    """Return whether a registry gave the image. One that does not even answer is given up after a short time."""
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
        while line := await asyncio.wait_for(process.stdout.readline(), limit):  # type: ignore[union-attr]
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


async def _bootstrap(engine: Engine, say: Say) -> str:
    """Build the base from this machine's own archive and return its tag."""
    release, found = sources.read_os_release(), sources.read()
    tag = archive_base_tag(release, found)
    if not shutil.which("mmdebstrap"):
        raise ImageError(
            "no image registry answers, and mmdebstrap, which builds the image from this machine's apt sources, is missing",
            fix="run `tools/setup.sh engine`, or install the package mmdebstrap",
        )
    say(f"building the base image from this machine's archive ({release.get('PRETTY_NAME', tag)}): about a minute")
    await _remove_partial(engine)
    scratch = state_root() / "lab" / "build"
    await _remove_tree(scratch)
    scratch.mkdir(parents=True)
    log = scratch / "mmdebstrap.log"
    try:
        scratch.chmod(0o755)
        image = await _pipe(mmdebstrap_command(release["VERSION_CODENAME"], scratch), engine, found, log)
        await engine.run("tag", image, tag)
    finally:
        await _remove_tree(scratch)
    return tag


def mmdebstrap_command(codename: str, scratch: Path, *, root: bool | None = None) -> list[str]:
    """Return the command that writes the base system as a tar archive; its sources come on standard input."""
    as_root = os.geteuid() == 0 if root is None else root
    command = [] if as_root else ["sudo", "-n"]
    command += ["env", f"TMPDIR={scratch}", "mmdebstrap", "--variant=minbase", "--mode=root", "--format=tar"]
    command += [f"--include={','.join(PACKAGES)}"]
    command += [f"--dpkgopt=path-exclude={pattern}" for pattern in EXCLUDED]
    command += [f"--aptopt={setting}" for setting in sources.apt_settings()]
    return [*command, codename, "-", "-"]


async def _pipe(command: list[str], engine: Engine, found: list[sources.Source], log: Path) -> str:
    """Stream mmdebstrap's archive into the engine and return the image's id. It gets no name before all of it is there."""
    importing = [*engine.command, "import", "--change", f"LABEL {LABEL}=base", "-"]
    with log.open("wb") as stderr:
        make = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True
        )
        take = subprocess.Popen(importing, stdin=make.stdout, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert make.stdin and make.stdout  # noqa: S101 - both are pipes
    make.stdout.close()
    make.stdin.write("".join(source.line() + "\n" for source in found).encode())
    make.stdin.close()
    try:
        async with asyncio.timeout(BASE_TIMEOUT):
            stdout, stderr_text = await asyncio.to_thread(take.communicate)
            code = await asyncio.to_thread(make.wait)
    except BaseException as exc:
        for process in (make, take):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(make.pid, signal.SIGTERM) if process is make else process.kill()
        if isinstance(exc, TimeoutError):
            raise ImageError(f"mmdebstrap did not end within {BASE_TIMEOUT:.0f} s") from None
        raise
    image = stdout.decode().strip()
    if code or take.returncode or not image:
        tail = " / ".join(line for line in log.read_text(errors="replace").splitlines()[-5:])
        if image:
            await engine.run("image", "rm", "-f", image, check=False)
        raise ImageError(
            f"the base image could not be built: {tail or last_line(stderr_text.decode(errors='replace'))}",
            where=" ".join(command[:1]),
            fix="mend what it names (network, apt sources, rights), then run this again",
        )
    return image


async def _remove_partial(engine: Engine) -> None:
    """Remove images that an interrupted build left without a name."""
    filters = ["--filter", "dangling=true", "--filter", f"label={LABEL}=base"]
    left = (await engine.run("image", "ls", "-q", *filters, check=False)).stdout.split()
    if left:
        await engine.run("image", "rm", "-f", *left, check=False)


async def _remove_tree(path: Path) -> None:
    """Remove a directory that may hold files of root."""
    command = [] if os.geteuid() == 0 else ["sudo", "-n"]
    await asyncio.to_thread(subprocess.run, [*command, "rm", "-rf", "--one-file-system", str(path)], check=False)


async def _build_worker(engine: Engine, base: str, tag: str, files: Mapping[Path, bytes], say: Say) -> Image:
    """Build the top layer."""
    say(f"building the worker image on {base}")
    script = '. /etc/os-release; echo "$PRETTY_NAME"; systemctl --version'
    lines = (await engine.run("run", "--rm", "--network=none", "--entrypoint=sh", base, "-c", script)).stdout.splitlines()
    labels = {LABEL: "worker", f"{LABEL}.system": lines[0], f"{LABEL}.systemd": lines[1].split()[1].split(".")[0]}
    with tempfile.TemporaryDirectory(prefix="tpu-lab-image-") as folder:
        for path, content in files.items():
            target = Path(folder) / "root" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        shutil.copy(HERE / "files" / "worker.Dockerfile", Path(folder) / "Dockerfile")
        await _build(engine, Path(folder), tag, {"BASE": base}, "none", labels)
    image = await _there(engine, tag)
    if image is None:
        raise ImageError(f"{engine.name} built the worker image, and it is not there", where=tag)
    return image


async def _build(
    engine: Engine,
    folder: Path,
    tag: str,
    arguments: Mapping[str, str],
    network: str,
    labels: Mapping[str, str] | None = None,
) -> None:
    """Build a directory's Dockerfile under a tag."""
    command = ["build", "--tag", tag, "--network", network]
    for name, value in arguments.items():
        command += ["--build-arg", f"{name}={value}"]
    for name, value in (labels or {LABEL: "base"}).items():
        command += ["--label", f"{name}={value}"]
    try:
        done = await engine.run(*command, str(folder), timeout=BASE_TIMEOUT, check=False)
    except EngineError as exc:
        raise ImageError(exc.what, where=tag, fix=exc.fix) from exc
    if done.code:
        tail = " / ".join((done.stdout + done.stderr).strip().splitlines()[-5:])
        raise ImageError(f"the image could not be built: {tail}", where=tag, fix="mend what it names, then run this again")


def main() -> int:
    """Build the image of one runtime version by hand and print its tag."""
    parser = argparse.ArgumentParser(prog="python -m tpu_ops.lab.image.build", description=main.__doc__)
    parser.add_argument("--runtime", default="tpu-ubuntu2204-base", help="runtime version (default: %(default)s)")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        image = asyncio.run(ensure(find(), args.runtime))
    except OpsError as exc:
        _log.error("error: %s", exc)  # noqa: TRY400 - a user's error has no traceback
        return int(exc.exit_code)
    sys.stdout.write(f"{image.tag}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
