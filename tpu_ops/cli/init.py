"""`tpu_ops init`: write a fleet directory."""

from __future__ import annotations

import argparse
import getpass
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tpu_ops import config, files
from tpu_ops.ansible import new_fleet, playbook
from tpu_ops.ansible.new_fleet import Choices
from tpu_ops.cli import output
from tpu_ops.config import FLEET_FILE
from tpu_ops.config.read import PRIVATE_KEYS
from tpu_ops.errors import ExitCode, UsageError
from tpu_ops.fleet.publishing import sources

#: Permissions of the files.
_MODE = 0o644
#: What a user can choose, besides the directory.
_CHOICES = ("snapshot", "project", "zone", "user", "key", "python", "python_source", "packages")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops init`."""
    parser.add_argument("directory", nargs="?", default=".", metavar="DIR", help="the directory (default: this one)")
    parser.add_argument("--project", help="your Google Cloud project")
    parser.add_argument(
        "--snapshot",
        metavar="SOURCE",
        help="a published snapshot in place of a project, as in gs://my-bucket/fleet.json",
    )
    parser.add_argument("--zone", help="zones of your TPUs, as in us-central2-b,europe-west4-b (default: all)")
    parser.add_argument("--user", help="your account on the workers (default: your name here)")
    parser.add_argument("--key", metavar="FILE", help="your private ssh key (default: the first of your usual ones)")
    parser.add_argument("--python", help="version of Python for JAX (default: 3.12)")
    parser.add_argument(
        "--python-source", choices=("deadsnakes", "uv"), help="where it comes from (default: deadsnakes, for Ubuntu)"
    )
    parser.add_argument("--packages", metavar="LIST", help="packages beside JAX, as in flax,optax")
    parser.epilog = (
        "On a terminal, it asks for what is not given. In a directory that is a fleet already, it only writes "
        "ansible.cfg and site.yml anew, which lead plain Ansible to this installation of tpu_ops."
    )


def run(args: argparse.Namespace) -> int:
    """Write the files of a new fleet, or those for plain Ansible of an existing one."""
    folder = files.resolved(args.directory, "DIR")
    there = (folder / FLEET_FILE).exists()
    if there and (given := [name for name in _CHOICES if getattr(args, name) is not None]):
        what = "this is a fleet already, and its file is yours to edit"
        option = f"--{given[0].replace('_', '-')}"
        raise UsageError(what, where=str(folder / FLEET_FILE), fix=f"leave out {option}, or name another directory")
    texts = new_fleet.for_ansible() | ({} if there else new_fleet.files_of(_choices(args)))
    for path, text in texts.items():
        file = folder / path
        if os.path.lexists(file) and not playbook.is_generated(file):
            output.info(f"{_shown(file)} is your own and stays as it is")
            continue
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            files.replace(file, text, _MODE)
        except OSError as exc:
            raise files.unwritable(file, exc) from exc
        output.line(f"wrote {_shown(file)}")
    if not there:
        output.info("next:")
        for text in _next(folder):
            output.info(f"  {text}")
    return ExitCode.OK


def _choices(args: argparse.Namespace) -> Choices:
    """Return what the user has given or answers.

    Raises:
        UsageError: The project is not given, and there is no terminal to ask on; or a value is malformed.
    """
    asks = sys.stdin.isatty()
    snapshot = sources.parse(args.snapshot, config.here(), "--snapshot") if args.snapshot else ""
    if snapshot and args.project:
        raise UsageError("a snapshot names its projects itself", where="--project", fix="leave out one of both")
    asks = asks and not snapshot
    project = "" if snapshot else args.project or os.environ.get("TPU_OPS_PROJECT", "")
    if not project and asks:
        project = _answer("your Google Cloud project", _of_gcloud())
    if not project and not snapshot:
        raise UsageError("which project has your TPUs?", where="--project", fix="give it, as in --project my-project")
    zone = args.zone if args.zone is not None else _answer("zones of your TPUs, empty for all", "") if asks else ""
    user = args.user or getpass.getuser()
    key = args.key or (_answer("your private ssh key", _key()) if asks else _key())
    packages = args.packages
    if packages is None:
        packages = _answer("Python packages beside JAX, as in flax,optax", "") if asks else ""
    return Choices(
        snapshot,
        config.check_project(project, "--project") if project else "",
        tuple(config.check_zone(word, "--zone") for word in _words(zone)),
        user,
        key,
        args.python or "3.12",
        args.python_source or "deadsnakes",
        tuple(_words(packages)),
    )


def _words(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _answer(question: str, default: str) -> str:
    """Ask a question; return the answer, or the default for an empty one."""
    output.info(f"{question}{f' [{default}]' if default else ''}:")
    return sys.stdin.readline().strip() or default


def _of_gcloud() -> str:
    """Return the project that gcloud uses; empty if there is none."""
    if not shutil.which("gcloud"):
        return ""
    command = ["gcloud", "config", "get-value", "project", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _key() -> str:
    """Return the first of the user's usual private keys; the usual name of a new one if there is none."""
    home = Path.home() / ".ssh"
    return next((f"~/.ssh/{name}" for name in PRIVATE_KEYS if (home / name).exists()), f"~/.ssh/{PRIVATE_KEYS[0]}")


def _shown(file: Path) -> str:
    here = config.here()
    return str(file.relative_to(here)) if file.is_relative_to(here) else str(file)


def _next(folder: Path) -> list[str]:
    """Return what the user does next, as lines of a shell."""
    lines = [] if folder == config.here() else [f"cd {_shown(folder)}"]
    if not Path(_key()).expanduser().exists():
        lines.append("ssh-keygen -t ed25519              # you have no ssh key yet")
    return [
        *lines,
        "tpu_ops doctor --self              # is everything ready here: key, login, project, API?",
        "tpu_ops grant import               # with a grant of TPUs: paste Google's e-mail",
        "tpu_ops create box --type v2-8     # --zone as well if the fleet has several",
        "tpu_ops configure                  # Python, JAX and the launcher",
        "tpu_ops train box --sync my-code -- python train.py",
    ]
