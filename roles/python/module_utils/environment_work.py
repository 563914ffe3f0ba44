"""Work on virtual environments with uv; runs on Python 3.8."""

from __future__ import annotations

import glob
import hashlib
import os
import platform
import pwd
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

from ansible.module_utils.environment_projects import honouring, projects_word
from ansible.module_utils.environment_sets import Listed, needed, read_listed, required, write_listed
from ansible.module_utils.environment_state import (
    correct_record,
    damaged,
    editable,
    from_index,
    fully_hashed,
    named,
    pin_lines,
)
from ansible.module_utils.installed_packages import (
    digest,
    dist_infos,
    minor,
    normalised,
    packages,
    pinned_packages,
    python_version,
)
from ansible.module_utils.uv_program import Fault, Uv, plan_lines

#: A file that exists in an environment from before its packages change until the final check has succeeded.
UNPROVED = ".tpu_ops-unproved"

#: The files of an environment that belong to one Python version, with pyvenv.cfg last; other files belong to users.
PARTS = ("bin", "etc", "include", "lib", "lib64", "share", "pyvenv.cfg")
#: Directory in an environment for its `PARTS` of an earlier Python version, until the new ones are complete.
KEPT = ".old-%Y%m%dT%H%M%SZ"
IS_KEPT = re.compile(r"\.old-\d{8}T\d{6}Z")

#: Time limit in seconds for a Python to start and print its version.
START = 60.0


def runs_version(python: str) -> str:
    """Run a Python and return its version as major.minor; empty if it does not run.

    Raises:
        Fault: The Python does not answer in time, as on a busy worker.
    """
    try:
        return subprocess.run(
            [python, "-I", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            universal_newlines=True,
            timeout=START,
            check=True,
        ).stdout.strip()
    except subprocess.TimeoutExpired as exc:
        raise Fault("%s did not report its version within %g s; it was left as it is" % (python, exc.timeout)) from exc
    except (OSError, subprocess.SubprocessError):
        return ""


class Environment:
    """One environment; its methods must run with the rights of its owner."""

    def __init__(self, wanted: dict[str, Any], uv: Uv) -> None:
        self.wanted = wanted
        self.path = wanted["path"]
        self.python = os.path.join(self.path, "bin", "python")
        self.unproved = os.path.join(self.path, UNPROVED)
        #: Why the slice's index was not used.
        self.missed = ""
        self.uv = uv
        if os.path.isabs(wanted["python"]):
            self.interpreter = [wanted["python"]]
        else:
            self.interpreter = [wanted["python"], "--python-preference", "only-managed"]

    def runs(self) -> bool:
        """Return whether the environment's Python runs and has the requested version."""
        return runs_version(self.python) == str(self.wanted["python_version"])

    def can_resolve(self) -> bool:
        """Return whether uv exists and the environment's Python runs, so that a lock can be resolved."""
        return os.path.exists(self.uv.program) and self.runs()

    def made_for(self) -> str:
        """Return the version of Python that an environment was created for; empty if there is no environment."""
        made: str = minor(python_version(self.path))
        return made

    def is_fresh(self) -> bool:
        """Return whether the environment must be created or recreated."""
        return not self.runs() and self.made_for() != str(self.wanted["python_version"])

    def install(self, directory: str, *options: str, needs: list[str] | None = None) -> list[str]:
        """Install the packages of the lock, or without a lock the requirements, and return uv's plan.

        Args:
            directory: A directory for files that uv reads.
            options: More options for uv.
            needs: Requirements of projects, which are also installed if there is no lock.
        """
        lock = self.wanted["lock"]
        arguments = ["pip", "install", "--python", self.python, *options, *self.links()]
        arguments += ["--reinstall-package=%s" % name for name in damaged(self.path)]
        if lock:
            arguments += ["--no-deps", "--requirements", written(directory, "lock.txt", lock)]
            arguments += ["--require-hashes"] if fully_hashed(lock) else []
        else:
            requirements, constraints = self.texts(directory, needs or [])
            arguments += ["--requirements", requirements, *constraints]
        if "--require-hashes" in arguments and "--dry-run" not in arguments:
            (_, said), self.missed = self.uv.run_sharing(*arguments, place=self.path)
            return list(plan_lines(said))
        plan: list[str] = plan_lines(self.uv.run(*arguments, place=self.path)[1])
        return plan

    def settle(self, directory: str, plan: list[str]) -> None:
        """Repair packages that the installation left damaged, and accept those that it cannot repair.

        Some wheels record wrong lengths of their files. Two packages can contain the same file, which then has the
        length of the other package's file, or is removed with the other package.
        """
        if not damaged(self.path):
            return
        # uv's cache is not used: a changed file may be a link to the cache, and then the cached file is changed too.
        plan = plan + self.install(directory, "--no-cache")
        installed = {normalised(line[2:].partition("==")[0]) for line in plan if line[0] in "+~"}
        there = dist_infos(self.path)
        for name in installed.intersection(damaged(self.path)):
            correct_record(there[name][1])

    def links(self) -> list[str]:
        """Return uv's options for the pages in find_links."""
        return [option for link in self.wanted["find_links"] for option in ("--find-links", link)]

    def texts(self, directory: str, needs: list[str]) -> tuple[str, list[str]]:
        """Write the listed and the projects' requirements to one file, and the constraints to another.

        Returns:
            The path of the requirements, and uv's options for the constraints.
        """
        requirements = written(directory, "requirements.txt", "\n".join([*self.wanted["requirements"], *needs]))
        if not self.wanted["constraints"]:
            return requirements, []
        constraints = written(directory, "constraints.txt", "\n".join(self.wanted["constraints"]))
        return requirements, ["--constraints", constraints]

    def kept(self) -> list[str]:
        """Return the directories with the environment's `PARTS` of an earlier Python version."""
        names = sorted(os.listdir(self.path)) if os.path.isdir(self.path) else []
        return [os.path.join(self.path, name) for name in names if IS_KEPT.fullmatch(name)]

    def surplus(self) -> list[str]:
        """Return the packages to remove, since the list or its lock does not need them, nor do people's projects."""
        exact, lock, listed = self.wanted["exact"], self.wanted["lock"], self.wanted["requirements"]
        if lock and not (exact or self.wanted["agreed"]):
            return []
        # With an empty list, all packages stay. Only uv can read a list with further files of requirements.
        if not lock and (not listed or any(line.startswith(("-r", "--requirement")) for line in listed)):
            return []
        python, there = python_version(self.path), dist_infos(self.path)
        kept = named(lock) | needed(self.path) if lock else required(self.path, listed, python)
        if exact and lock:
            return [name for name, (_, entry) in there.items() if name not in kept and not editable(entry)]
        if self.wanted["owner"] != "root":
            # The owner may add packages. They stay, with all that they need.
            before = read_listed(self.path)
            ours = required(self.path, before.requirements or before.constraints, python)
            kept |= required(self.path, [name for name in there if name not in ours], python)
        # People's own projects stay.
        return [name for name, (_, entry) in there.items() if name not in kept and from_index(entry)]

    def is_forbidden(self, name: str) -> bool:
        """Return whether the pattern `forbidden` excludes a package from the environment."""
        return bool(re.fullmatch(self.wanted["forbidden"], name))

    def report(self, plan: list[str], *, fresh: bool, overruled: list[str] | None = None) -> dict[str, Any]:
        """Return the state of the environment, as the module returns it."""
        found = {} if fresh else packages(self.path)
        there = {} if fresh else {name: entry for name, (_, entry) in dist_infos(self.path).items()}
        return {
            "fresh": fresh,
            "plan": plan,
            "locked": bool(self.wanted["lock"]),
            "key": self.key(),
            "damaged": [] if fresh else damaged(self.path),
            "packages": found,
            "editable": [name for name, entry in there.items() if editable(entry)],
            "local": [name for name, entry in there.items() if not (editable(entry) or from_index(entry))],
            "digest": "" if fresh else digest(python_version(self.path), found),
            "projects": "" if fresh else projects_word(self.path),
            "overruled": overruled or [],
            "recorded": read_listed(self.path) == self.listed(),
        }

    def listed(self) -> Listed:
        """Return the listed requirements of the environment in the form that the role workspace reads."""
        source = "%s (environment %s)" % (self.wanted["variable"], self.wanted["name"])
        if self.wanted["lock"]:
            return Listed("the lock file of " + source, [], pin_lines(self.wanted["lock"]), self.wanted["find_links"])
        names = ("requirements", "constraints", "find_links")
        return Listed(source, *(list(self.wanted[name]) for name in names))

    def record(self) -> dict[str, Any]:
        """Record the listed requirements in the environment, and return its state."""
        write_listed(self.path, self.listed())
        return self.report([], fresh=False)

    def key(self) -> str:
        """Return a digest that is equal for hosts whose environments can have the same set of packages."""
        names = ("python_version", "requirements", "constraints", "find_links")
        parts = [platform.machine(), *(str(self.wanted[name]) for name in names)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]

    def look(self) -> dict[str, Any]:
        """Return the state of the environment, and the changes that it needs."""
        if self.is_fresh():
            return self.unmade()
        if not self.runs():
            return self.report(["~ Python %s" % self.wanted["python_version"]], fresh=False)
        if not os.path.exists(self.uv.program):
            return self.report(["~ uv"], fresh=False)
        overruled: list[str] = []
        with tempfile.TemporaryDirectory() as directory:
            plan = self.install(directory, "--dry-run")
            if plan:
                plan, overruled = self.honouring(lambda needs: self.planned(directory, plan, needs))
        plan += ["- %s" % name for name in self.surplus()]
        if self.wanted["proof"] and os.path.exists(self.unproved):
            plan.append("~ packages that did not work")
        plan += ["- %s" % path for path in self.kept()]
        return self.report(plan, fresh=False, overruled=overruled)

    def honouring(self, attempt: Callable[[list[str]], Any]) -> tuple[Any, list[str]]:
        """Run an attempt with the requirements of the environment's projects; see the function `honouring`.

        Raises:
            Fault: No set of packages meets all requirements.
        """
        if self.is_fresh():
            return attempt([]), []
        moving, source = self.wanted["moving"], self.listed().source
        done: tuple[Any, list[str]] = honouring(self.path, moving, source, attempt)
        return done

    def planned(self, directory: str, plan: list[str], needs: list[str]) -> list[str]:
        """Return the changes that also meet the projects' requirements.

        Args:
            directory: A directory for files that uv reads.
            plan: The changes without the projects' requirements.
            needs: The projects' requirements.

        Raises:
            Fault: No set of packages meets all requirements.
        """
        if not needs:
            return plan
        if not self.wanted["lock"]:
            return self.install(directory, "--dry-run", needs=needs)
        options = ["--requirements", written(directory, "needs.txt", "\n".join(needs)), "--constraints"]
        options.append(written(directory, "pins.txt", "\n".join(self.listed().constraints)))
        self.uv.run("pip", "install", "--python", self.python, "--dry-run", *self.links(), *options, place=self.path)
        return plan

    def unmade(self) -> dict[str, Any]:
        """Return the state if there is no usable environment, with the changes to make; no program is run."""
        pinned = ["%s==%s" % pin for pin in pinned_packages(self.wanted["lock"]).items()]
        plan = ["+ %s" % name for name in pinned or self.wanted["requirements"]]
        if os.path.lexists(os.path.join(self.path, "pyvenv.cfg")):
            plan.insert(0, "~ Python %s (was %s)" % (self.wanted["python_version"], self.made_for() or "unknown"))
        return self.report(plan, fresh=True)

    def resolve(self) -> str:
        """Return the text of a lock that meets the requirements; installed versions that meet them are kept.

        The lock also contains the requirements of the environment's projects. Other packages of the environment are not
        in it: all workers get the lock, and nobody has listed these packages.
        """
        with tempfile.TemporaryDirectory() as directory:
            there = {} if self.is_fresh() else packages(self.path)
            # uv prefers the versions that an existing output file pins, so the installed versions are written there.
            output = written(directory, "lock.txt", "".join("%s==%s\n" % pin for pin in sorted(there.items())))

            def compiled(needs: list[str]) -> str:
                requirements, constraints = self.texts(directory, needs)
                return self.compiled(output, requirements, *constraints)

            lock: str = self.honouring(compiled)[0]
        self.allow(lock)
        return lock

    def compiled(self, output: str, requirements: str, *options: str) -> str:
        """Run `uv pip compile` on a file of requirements, and return the text of the lock."""
        arguments = ["pip", "compile", "--quiet", "--no-header", "--no-annotate", "--generate-hashes", *self.links()]
        arguments += ["--python", *self.interpreter, "--python-version", self.wanted["python_version"], *options]
        self.uv.run(*arguments, "--output-file", output, "--", requirements)
        with open(output, encoding="utf-8") as stream:
            return stream.read()

    def allow(self, lock: str) -> None:
        """Reject a lock with forbidden packages.

        Raises:
            Fault: The lock has forbidden packages.
        """
        names = [name for name in pinned_packages(lock) if self.is_forbidden(name)]
        if names:
            raise Fault(
                "%s would get packages that it must not have: %s; request a build without them"
                % (self.path, ", ".join(names))
            )

    def make(self) -> None:
        """Create the environment, or repair its Python. Its `PARTS` of another Python version are moved aside.

        Raises:
            Fault: The path exists but is not an environment.
        """
        if os.path.lexists(self.path) and not os.path.isdir(self.path):
            raise Fault(
                "%s is in the way: it is not a directory; move it elsewhere, or give the environment another path"
                % self.path
            )
        os.makedirs(self.path, mode=0o755, exist_ok=True)
        names = os.listdir(self.path)
        # After an interrupted run, all parts may be moved aside and pyvenv.cfg not created yet.
        if names and "pyvenv.cfg" not in names and not self.kept():
            raise Fault(
                "%s is in the way: it is not empty and not a virtual environment; move it elsewhere, or give the"
                " environment another path" % self.path
            )
        if self.is_fresh():
            kept = os.path.join(self.path, time.strftime(KEPT, time.gmtime()))
            for name in PARTS:
                if name in names:
                    os.makedirs(kept, mode=0o755, exist_ok=True)
                    os.rename(os.path.join(self.path, name), os.path.join(kept, name))
        self.uv.run("venv", "--no-project", "--allow-existing", "--python", *self.interpreter, self.path)

    def fill(self) -> dict[str, Any]:
        """Install the set of packages, remove surplus ones, run the final check, and return the environment's state.

        Raises:
            Fault: uv or the final check failed.
        """
        self.allow(self.wanted["lock"])
        with self.uv.take_turn(), tempfile.TemporaryDirectory() as directory:
            remade = [] if self.runs() else ["~ Python %s" % self.wanted["python_version"]]
            if remade:
                self.make()
            if self.wanted["proof"]:
                written(self.path, UNPROVED, "")
            plan = self.install(directory)
            gone = self.surplus()
            if gone:
                self.uv.run("pip", "uninstall", "--python", self.python, "--", *gone)
            self.settle(directory, plan)
        self.prove()
        for path in self.kept():
            shutil.rmtree(path)
        return self.report(remade + plan + ["- %s" % name for name in gone], fresh=False) | {"missed": self.missed}

    def prove(self) -> None:
        """Run the final check `proof`; until it succeeds, the environment counts as broken.

        Raises:
            Fault: The final check failed.
        """
        if not self.wanted["proof"]:
            return
        done = subprocess.run(
            [self.python, "-I", "-c", self.wanted["proof"]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            universal_newlines=True,
            timeout=self.uv.timeout,
            check=False,
        )
        if done.returncode:
            raise Fault("%s is filled but does not work: %s" % (self.path, done.stdout.strip()[-2000:]))
        os.unlink(self.unproved)


def written(directory: str, name: str, text: str) -> str:
    """Write a file and return its path."""
    path = os.path.join(directory, name)
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(text if text.endswith("\n") else text + "\n")
    return path


def check_owner(path: str, account: pwd.struct_passwd) -> None:
    """Reject an existing environment that does not belong to the requested owner.

    Raises:
        Fault: The environment belongs to another account.
    """
    if os.path.lexists(path) and os.lstat(path).st_uid != account.pw_uid:
        raise Fault(
            "%s belongs to uid %d and not to %s; remove or rename it, or chown -R it to %s"
            % (path, os.lstat(path).st_uid, account.pw_name, account.pw_name)
        )


def give(path: str, account: pwd.struct_passwd) -> None:
    """As root, create the missing directory of an environment for another owner.

    Raises:
        Fault: Others than root can write to a parent directory, and could replace the new directory.
    """
    if os.path.lexists(path):
        return
    parent, missing = os.path.dirname(path), [path]
    while not os.path.lexists(parent):
        parent, missing = os.path.dirname(parent), [parent, *missing]
    here = parent
    while True:
        entry = os.lstat(here)
        if entry.st_uid == account.pw_uid and here == parent and not os.path.islink(here):
            return  # The owner can write to the parent directory, and creates the directory later.
        if os.path.islink(here) or entry.st_uid or entry.st_mode & 0o022:
            raise Fault("%s is writable by others than root; create %s yourself" % (here, path))
        if here == "/":
            break
        here = os.path.dirname(here)
    for each in missing:
        os.mkdir(each, 0o755)
    os.chown(path, account.pw_uid, account.pw_gid)


def brought(directory: str, version: str) -> str:
    """Return the path of a Python of this version that uv installed and that runs; empty if there is none."""
    for path in sorted(glob.glob("%s/*-%s.*/bin/python%s" % (glob.escape(directory), version, version))):
        if runs_version(path) == version:
            return path
    return ""
