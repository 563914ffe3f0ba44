#!/usr/bin/python
"""Module that makes and fills a virtual environment with uv; runs on Python 3.8."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import time
from typing import TextIO

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: uv_environment
short_description: Make a virtual environment with uv and bring its packages to a set of requirements
description:
  - Asks uv what the environment holds, and installs only where that does not satisfy O(requirements). Packages that
    nothing requires are left alone.
  - An environment whose Python does not run, or is of another version than O(python), is made anew.
  - Installations from one O(cache_dir) take turns, so that workers that share it download each package once.
options:
  path:
    description: The environment.
    type: path
    required: true
  uv:
    description: The program uv.
    type: path
    required: true
  python:
    description: Path of a Python, or a version for uv to find.
    type: str
    required: true
  python_version:
    description: Version of that Python as major.minor.
    type: str
    required: true
  requirements:
    description: Requirements as pip reads them.
    type: list
    elements: str
    required: true
  find_links:
    description: Pages or directories to look for packages in besides the index.
    type: list
    elements: str
    default: []
  cache_dir:
    description: uv's cache.
    type: path
    required: true
  timeout:
    description: Seconds that one step may take, waiting for another worker's turn with the cache included.
    type: int
    default: 1800
author: [tpu_ops]
"""

EXAMPLES = r"""
- name: Fill the environment
  uv_environment:
    path: /opt/venvs/jax
    uv: /opt/uv/bin/uv
    python: /usr/bin/python3.12
    python_version: "3.12"
    requirements: ["jax==0.10.2"]
    cache_dir: /var/cache/uv
"""

RETURN = r"""
packages:
  description: What the environment holds, as name==version, sorted.
  type: list
  returned: always
digest:
  description: First twelve hexadecimal digits of the SHA-256 of O(packages); equal where the sets are equal.
  type: str
  returned: always
plan:
  description: What was or would be done, one line per package.
  type: list
  returned: always
"""

#: uv's report of a package that it adds, removes or reinstalls.
PLAN = re.compile(r"^ ([+~-]) (\S+)", re.MULTILINE)


def plan_lines(report: str) -> list[str]:
    """Given what uv wrote to stderr, return one line per package that it changes or would change."""
    return ["%s %s" % match for match in PLAN.findall(report)]


def set_digest(packages: list[str]) -> str:
    """Given names and versions, return the digest of the set."""
    return hashlib.sha256("\n".join(sorted(packages)).encode()).hexdigest()[:12]


def device(path: str) -> int:
    """Return the device number of the file system that holds a path or would hold it."""
    path = os.path.abspath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return os.stat(path).st_dev


class Environment:
    """One environment, and uv to work on it."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.path = module.params["path"]
        self.python = os.path.join(self.path, "bin", "python")
        self.uv = module.params["uv"]
        self.cache = module.params["cache_dir"]
        self.timeout = module.params["timeout"]
        self.environ = dict(os.environ, UV_CACHE_DIR=self.cache, UV_NO_PROGRESS="1", NO_COLOR="1")
        if device(self.cache) != device(self.path):
            self.environ["UV_LINK_MODE"] = "copy"

    def run(self, *arguments: str) -> tuple[str, str]:
        """Run uv and return what it wrote to stdout and stderr; end the module with uv's words where it fails."""
        command = [self.uv, *arguments]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                universal_newlines=True,
                env=self.environ,
                timeout=self.timeout,
                check=False,
            )
        except OSError as exc:
            self.module.fail_json(msg="%s does not run (%s); the role python installs it" % (self.uv, exc))
        except subprocess.TimeoutExpired:
            self.module.fail_json(msg="%s did not end within %d s" % (" ".join(command), self.timeout))
        if done.returncode:
            self.module.fail_json(
                msg="%s ended with %d: %s" % (" ".join(command), done.returncode, done.stderr.strip()[-2000:])
            )
        return done.stdout, done.stderr

    def version(self) -> str:
        """Return the version of the environment's Python as major.minor; empty where there is none that runs."""
        try:
            return subprocess.run(
                [self.python, "-I", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                universal_newlines=True,
                timeout=60,
                check=True,
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return ""

    def install(self, *options: str) -> list[str]:
        """Install the requirements, and return uv's plan."""
        links = [option for link in self.module.params["find_links"] for option in ("--find-links", link)]
        arguments = ["pip", "install", "--python", self.python, *options, *links, "--"]
        return plan_lines(self.run(*arguments, *self.module.params["requirements"])[1])

    def packages(self) -> list[str]:
        """Return what the environment holds."""
        return sorted(self.run("pip", "freeze", "--python", self.python)[0].split("\n")[:-1])

    def take_turn(self) -> TextIO:
        """Wait until no other installation uses the cache; the lock is held until the returned file is closed."""
        os.makedirs(self.cache, mode=0o755, exist_ok=True)
        lock = open(os.path.join(self.cache, ".tpu_ops.lock"), "a")  # noqa: SIM115 - kept open, it is the lock
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    self.module.fail_json(msg="another installation has held %s for %d s" % (lock.name, self.timeout))
                time.sleep(0.2)  # polls the lock until the deadline
            else:
                return lock

    def make(self) -> None:
        """Make the environment anew."""
        if os.path.lexists(self.path) and not os.path.isdir(self.path):
            self.module.fail_json(msg="%s is in the way: it is not a directory" % self.path)
        os.makedirs(self.path, mode=0o755, exist_ok=True)
        names = os.listdir(self.path)
        if names and "pyvenv.cfg" not in names:
            self.module.fail_json(msg="%s is in the way: it is not empty and no virtual environment" % self.path)
        # pyvenv.cfg goes last, so that an interrupted run can go on here.
        for name in sorted(names, key="pyvenv.cfg".__eq__):
            entry = os.path.join(self.path, name)
            if os.path.isdir(entry) and not os.path.islink(entry):
                shutil.rmtree(entry)
            else:
                os.unlink(entry)
        self.run("venv", "--no-project", "--python", self.module.params["python"], self.path)


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "uv": {"type": "path", "required": True},
            "python": {"type": "str", "required": True},
            "python_version": {"type": "str", "required": True},
            "requirements": {"type": "list", "elements": "str", "required": True},
            "find_links": {"type": "list", "elements": "str", "default": []},
            "cache_dir": {"type": "path", "required": True},
            "timeout": {"type": "int", "default": 1800},
        },
        supports_check_mode=True,
    )
    os.umask(0o022)
    environment = Environment(module)
    fresh = environment.version() != module.params["python_version"]
    if fresh and module.check_mode:
        plan = ["+ %s" % requirement for requirement in module.params["requirements"]]
        before = packages = []
    else:
        before = [] if fresh else environment.packages()
        plan = [] if fresh else environment.install("--dry-run")
        packages = before
        if (fresh or plan) and not module.check_mode:
            with environment.take_turn():
                if fresh:
                    environment.make()
                plan = environment.install()
            packages = environment.packages()
    module.exit_json(
        changed=bool(fresh or plan),
        plan=plan,
        packages=packages,
        digest=set_digest(packages),
        diff={"before": "".join(line + "\n" for line in before), "after": "".join(line + "\n" for line in packages)}
        if not module.check_mode
        else {"prepared": "".join(line + "\n" for line in plan)},
    )


if __name__ == "__main__":
    main()
