"""Run the fast tests with Debian 13's Python 3.13, in a container of the lab's image of that release.

Test results depend on the versions of Python and of ansible-core, which the lock pins for each Python. Checks of style
and types do not, so they are not run. Tests marked `module` are left out: they run the modules of roles, which
Molecule's scenarios run with Debian 13's own Python. So are those marked `signals`, which take an eighth of the time.

The container copies this clone and is set up with `make env`. Its environment is kept in the cache of the lab's
workers, one for each lock, for later runs.

Exit codes: 0 the tests passed, or Debian 13 is not available; 1 a test failed; 2 no container engine answers.
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
#: Programs that the tests need and that a worker does not have at its first boot.
PACKAGES = ("e2fsprogs", "git", "make")
#: Environment variables for a package index or proxy other than the default.
INDEX = re.compile(r"(PIP|UV)_(DEFAULT_INDEX|INDEX|INDEX_URL|EXTRA_INDEX_URL)|(HTTPS?|ALL|NO)_PROXY", re.IGNORECASE)
#: The copy of the clone has its own .venv/, so that the two Pythons do not share files.
SCRIPT = f"""
rsync --archive --no-owner --no-group --exclude-from=/clone/.gitignore /clone/ /root/clone/
cd /root/clone
kept={CACHE_MOUNT}/check-env/$(cat requirements.lock pyproject.toml | sha256sum | cut -c 1-16)
mkdir -p $kept/venv $kept/build
ln -s $kept/venv .venv
ln -s $kept/build .build
flock $kept/lock make --no-print-directory env
.venv/bin/python -c 'from importlib.metadata import version; import sys; print(sys.version, version("ansible-core"))'
exec make --no-print-directory TEST_PROCESSES=2 LEFT_OUT="lab or gcloud or index or module or signals" check-tests
"""


def index_settings(environ: Mapping[str, str]) -> list[str]:
    """Return this machine's settings for the package index as lines for the engine's --env-file."""
    return [f"{name}={value}" for name, value in sorted(environ.items()) if INDEX.fullmatch(name)]


def image(engine: Engine) -> str:
    """Return the tag of the image for the tests; build it if it does not exist.

    Raises:
        OpsError: Debian 13 is not available, or the image could not be built.
    """
    worker = asyncio.run(build.ensure(engine, RUNTIME, say)).tag
    # The packages are part of the tag.
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
    """Return the engine's arguments that run the tests in an image, with the settings of a file."""
    cache = [f"UV_CACHE_DIR={CACHE_MOUNT}/uv", f"PIP_CACHE_DIR={CACHE_MOUNT}/pip", "UV_LINK_MODE=copy"]
    args = ["run", "--rm", "--init", "--env-file", str(settings)]
    args += [part for setting in ("LANG=C.UTF-8", *cache) for part in ("--env", setting)]
    args += [part for name in CAPABILITIES for part in ("--cap-add", name)]
    args += ["--security-opt", "seccomp=unconfined", "--security-opt", "apparmor=unconfined"]
    args += ["--volume", f"{CACHE_VOLUME}:{CACHE_MOUNT}", "--volume", f"{ROOT}:/clone:ro"]
    return [*args, "--entrypoint", "/bin/bash", tag, "-euo", "pipefail", "-c", SCRIPT]


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"debian13: {text}", file=sys.stderr, flush=True)


def without_image(failure: OpsError) -> int:
    """Print why there is no image or engine; return the exit code."""
    # Skip the tests only if Debian 13 is not available (docs/unproved.md has a row for this); all else is an error.
    if "this machine's own archive has no" in failure.what:
        say(f"left out: {failure.what}")
        return 0
    say(f"error: {failure}")
    return int(failure.exit_code)


def main() -> int:
    """Run the tests; return the exit code."""
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
