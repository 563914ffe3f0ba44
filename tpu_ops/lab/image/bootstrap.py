"""The base image built from this machine's own Debian or Ubuntu archive, if no image registry answers."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

from tpu_ops.errors import OpsError
from tpu_ops.files import state_root
from tpu_ops.lab.engine import Engine, reason
from tpu_ops.lab.image import sources
from tpu_ops.lab.image.releases import Release

LABEL = "tpu-ops.lab.image"
BUILD_TIMEOUT = 900.0
REMOVE_TIMEOUT = 120.0
#: Packages of every worker at its first boot, as in a TPU VM's image; roles install all others. python3-h2 is for the
#: metrics service of the chips, which is in libtpu on a TPU VM.
PACKAGES = tuple(
    """
    ca-certificates curl dbus gnupg iproute2 iputils-ping libpam-systemd netbase openssh-client openssh-server passwd
    procps psmisc python3 python3-apt python3-h2 python3-venv rsync sudo systemd systemd-sysv tar tzdata xz-utils
    """.split()  # noqa: SIM905 - reads better than thirty quoted words
)
#: Files that mmdebstrap leaves out, since no worker needs them.
EXCLUDED = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/info/*")

Say = Callable[[str], None]


class ImageError(OpsError):
    """The image of a runtime version could not be built."""


def digest_of(parts: Mapping[str, bytes | str]) -> str:
    """Return the digest of these parts as 12 hexadecimal digits."""
    total = hashlib.sha256()
    for name in sorted(parts):
        value = parts[name]
        content = value.encode() if isinstance(value, str) else value
        total.update(f"{len(name)}:{name}:{len(content)}:".encode() + content)
    return total.hexdigest()[:12]


def base_tag(distribution: str, codename: str, found: list[sources.Source]) -> str:
    """Return the tag of the base image built from these sources of a release."""
    lines = "\n".join(source.line() + source.signed_by for source in found)
    parts = {"sources": lines, "packages": " ".join(PACKAGES), "excluded": " ".join(EXCLUDED)}
    return f"tpu-lab-base:{distribution}-{codename}-{digest_of(parts)}"


def mmdebstrap_command(codename: str, scratch: Path, *, root: bool) -> list[str]:
    """Return the command that writes the base system as a tar archive; it reads its sources from standard input.

    Args:
        codename: The release.
        scratch: The directory for unpacking.
        root: Whether root calls it; otherwise sudo is used, without a password.
    """
    command = [] if root else ["sudo", "-n"]
    command += ["env", f"TMPDIR={scratch}", "mmdebstrap", "--variant=minbase", "--mode=root", "--format=tar"]
    command += [f"--include={','.join(PACKAGES)}"]
    command += [f"--dpkgopt=path-exclude={pattern}" for pattern in EXCLUDED]
    command += [f"--aptopt={setting}" for setting in sources.apt_settings()]
    return [*command, codename, "-", "-"]


def known_tag(release: Release | None) -> str:
    """Return the tag of a release's base image (None: this machine's own release), built from this machine's archive.

    Raises:
        UsageError: The archive has no such release.
    """
    codename, found = sources.of_release(release)
    return base_tag(sources.read_os_release()["ID"], codename, found)


async def base(engine: Engine, release: Release | None, say: Say) -> str:
    """Build the base image of a release (None: this machine's own), return its tag; the caller holds the build lock.

    Raises:
        ImageError: mmdebstrap is missing or failed.
        UsageError: This machine has no usable apt source.
    """
    codename, found = sources.of_release(release)
    tag = known_tag(release)
    if not shutil.which("mmdebstrap"):
        raise ImageError(
            "no image registry answers, and mmdebstrap, which builds the image from this machine's archive, is missing",
            fix="run `tools/setup.sh engine`, or install the package mmdebstrap",
        )
    say(f"building the base image from this machine's archive ({release or codename}): about a minute")
    await _remove_unnamed(engine)
    # Other directories beside it belong to labs, whose names never contain a dash.
    scratch = state_root() / "lab" / "image-build"
    await _remove_tree(scratch)
    scratch.mkdir(parents=True, mode=0o755)
    try:
        command = mmdebstrap_command(codename, scratch, root=os.geteuid() == 0)
        image = await _import(engine, command, "".join(f"{source.line()}\n" for source in found), scratch / "log")
        await engine.run("tag", image, tag)
        await _remove_unnamed(engine)
    finally:
        await _remove_tree(scratch)
    return tag


async def _import(engine: Engine, command: list[str], lines: str, log: Path) -> str:
    """Stream mmdebstrap's archive into the engine; return the image's id. The image has no name yet."""
    pipe_out, pipe_in = os.pipe()
    processes = []
    try:
        with log.open("wb") as stderr:
            make = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, stdout=pipe_in, stderr=stderr, start_new_session=True
            )
        processes.append(make)
        take = await asyncio.create_subprocess_exec(
            *engine.command,
            *("import", "--change", f"LABEL {LABEL}=base", "-"),
            stdin=pipe_out,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        processes.append(take)
        # Both ends are closed here, so that each process notices when the other has ended.
        os.close(pipe_in)
        os.close(pipe_out)
        pipe_in = pipe_out = -1
        async with asyncio.timeout(BUILD_TIMEOUT):
            await make.communicate(lines.encode())
            said, failed = await take.communicate()
    except TimeoutError:
        raise ImageError(f"mmdebstrap did not end within {BUILD_TIMEOUT:.0f} s") from None
    finally:
        for end in (pipe_in, pipe_out):
            if end >= 0:
                os.close(end)
        for process in processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGTERM)
                await process.wait()
    image = said.decode().strip()
    if make.returncode == 0 and take.returncode == 0 and image:
        return image
    if image:
        await engine.run("image", "rm", "-f", image, check=False)
    why = reason(failed.decode(errors="replace")) if take.returncode else _tail(log)
    raise ImageError(
        f"the base image could not be built: {why}",
        where=" ".join(command[: command.index("mmdebstrap") + 1]) if make.returncode else f"{engine.name} import",
        fix="correct what it names (network, apt sources, rights), then run this again",
    )


def _tail(log: Path) -> str:
    return " / ".join(log.read_text(errors="replace").splitlines()[-5:]) or "no output"


async def _remove_unnamed(engine: Engine) -> None:
    """Remove unnamed images of interrupted builds."""
    filters = ["--filter", "dangling=true", "--filter", f"label={LABEL}=base"]
    left = (await engine.run("image", "ls", "-q", *filters, check=False)).stdout.split()
    if left:
        await engine.run("image", "rm", "-f", *left, check=False)


async def _remove_tree(path: Path) -> None:
    """Remove a directory with files of root, but no mounts that an interrupted mmdebstrap has left below it."""
    command = [*([] if os.geteuid() == 0 else ["sudo", "-n"]), "rm", "-rf", "--one-file-system", "--", str(path)]
    process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL)
    try:
        async with asyncio.timeout(REMOVE_TIMEOUT):
            await process.wait()
    except TimeoutError:
        raise ImageError(f"removing it did not end within {REMOVE_TIMEOUT:.0f} s", where=str(path)) from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                process.kill()
