"""Runs the fast tests with Debian 13's Python 3.13, in a container of the lab's image of that release.

What the tests find depends on the Python, and on the ansible-core that the lock has for it; style and types do not.
Tests marked `module` are left out: workers run the modules of roles, and Molecule's scenarios run them with Debian 13's
own Python.
The container copies this clone and sets itself up as any machine does (`make env`). Its environment stays in the cache
that the lab's workers share, one for each lock, so that a later run has it.

Exit codes: 0 the tests passed, or there is no image of Debian 13 here; 1 a test failed; 2 no container engine answers.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tpu_ops.errors import OpsError
from tpu_ops.lab.containers import CACHE_MOUNT, CACHE_VOLUME, CAPABILITIES
from tpu_ops.lab.engine import Engine, find
from tpu_ops.lab.image import build
from tpu_ops.lab.image.bootstrap import BUILD_TIMEOUT, LABEL

ROOT = Path(__file__).resolve().parent.parent
RUNTIME = "lab-debian13"
#: Programs that the tests call and a worker does not have from its first boot.
PACKAGES = ("e2fsprogs", "git", "make")
#: Where this machine reaches the package index, if not at the usual address.
INDEX = re.compile(r"(PIP|UV)_(DEFAULT_INDEX|INDEX|INDEX_URL|EXTRA_INDEX_URL)|(HTTPS?|ALL|NO)_PROXY", re.IGNORECASE)
#: The clone's copy has an environment of its own, so that neither of the two Pythons finds the other's files.
SCRIPT = f"""
rsync --archive --no-owner --no-group --exclude-from=/clone/.gitignore /clone/ /root/clone/
cd /root/clone
venv={CACHE_MOUNT}/check/$(cat requirements.lock pyproject.toml | sha256sum | cut -c 1-16)
mkdir -p $venv
ln -s $venv .venv
flock $venv.lock make --no-print-directory env
.venv/bin/python -c 'from importlib.metadata import version; import sys; print(sys.version, version("ansible-core"))'
exec make --no-print-directory TEST_PROCESSES=2 LEFT_OUT="lab or gcloud or index or module" check-tests
"""


def index_settings(environ: Mapping[str, str]) -> list[str]:
    """Return this machine's settings of the package index, as lines for the engine's --env-file."""
    return [f"{name}={value}" for name, value in sorted(environ.items()) if INDEX.fullmatch(name)]


def image(engine: Engine) -> str:
    """Return the tag of the image that the tests run in, built unless it is there.

    Raises:
        OpsError: There is no image of Debian 13 here, or it could not be built.
    """
    worker = asyncio.run(build.ensure(engine, RUNTIME, say)).tag
    # An image that lacks one of the packages has another tag.
    tag = f"tpu-lab-check:{'-'.join((worker.partition(':')[2], *PACKAGES))}"
    if engine.call("image", "inspect", tag, check=False).code:
        say(f"building the image {tag}")
        with tempfile.TemporaryDirectory(prefix="tpu-lab-image-") as folder:
            install = f"apt-get install -q -y --no-install-recommends {' '.join(PACKAGES)}"
            (Path(folder) / "Dockerfile").write_text(f"FROM {worker}\nRUN apt-get update -q && {install}\n")
            options = ["--tag", tag, "--label", f"{LABEL}=check", "--network", "host"]
            engine.call("build", *options, folder, timeout=BUILD_TIMEOUT)
    return tag


def arguments(tag: str, settings: Path) -> list[str]:
    """Return the engine's arguments that run the tests in an image, with the package index of a file."""
    cache = [f"UV_CACHE_DIR={CACHE_MOUNT}/uv", f"PIP_CACHE_DIR={CACHE_MOUNT}/pip", "UV_LINK_MODE=copy"]
    args = ["run", "--rm", "--init", "--env-file", str(settings)]
    args += [part for setting in ("LANG=C.UTF-8", *cache) for part in ("--env", setting)]
    args += [part for name in CAPABILITIES for part in ("--cap-add", name)]
    args += ["--security-opt", "seccomp=unconfined", "--security-opt", "apparmor=unconfined"]
    args += ["--volume", f"{CACHE_VOLUME}:{CACHE_MOUNT}", "--volume", f"{ROOT}:/clone:ro"]
    return [*args, "--entrypoint", "/bin/bash", tag, "-euo", "pipefail", "-c", SCRIPT]


def say(text: str) -> None:
    """Show a line of progress."""
    print(f"debian13: {text}", file=sys.stderr, flush=True)


def without_image(failure: OpsError) -> int:
    """Show why there is no image or engine, and return the exit code for it."""
    # The one failure that leaves these tests out; docs/unproved.md has a row for it.
    if "this machine's own archive has no" in failure.what:
        say(f"left out: {failure.what}")
        return 0
    say(f"error: {failure}")
    return int(failure.exit_code)


def main() -> int:
    """Run the tests and return their exit code."""
    try:
        engine = find()
        tag = image(engine)
    except OpsError as exc:
        return without_image(exc)
    with tempfile.NamedTemporaryFile("w", prefix="tpu-ops-index-") as settings:
        settings.write("".join(f"{line}\n" for line in index_settings(os.environ)))
        settings.flush()
        command = [*engine.command, *arguments(tag, Path(settings.name))]
        return int(subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
