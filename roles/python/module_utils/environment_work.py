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
from ansible.module_utils.environment_sets import Listed, needed, read_listed, write_listed
from ansible.module_utils.environment_state import (
    correct_record,
    damaged,
    editable,
    from_index,
    fully_hashed,
    named,
    pin_lines,
    pins,
)
from ansible.module_utils.installed_packages import digest, dist_infos, minor, normalised, packages, python_version
from ansible.module_utils.uv_program import NO_PACKAGE, NO_VERSION, Fault, Uv, plan_lines

#: Marker in an environment from before its packages change until the final check has passed.
UNPROVED = ".tpu_ops-unproved"

#: The parts of an environment that belong to one Python version, with pyvenv.cfg last; users own the rest.
PARTS = ("bin", "etc", "include", "lib", "lib64", "share", "pyvenv.cfg")
#: Directories in an environment with the parts that it had for another Python, until the new ones are complete.
KEPT = ".old-%Y%m%dT%H%M%SZ"
IS_KEPT = re.compile(r"\.old-\d{8}T\d{6}Z")

#: Seconds that a Python may take to start.
START = 60.0


def runs_version(python: str) -> str:
    """Return the version of a Python as major.minor; empty if it does not run.

    Raises:
        Fault: It runs but does not answer, as on a busy worker.
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
    """One environment; its methods run with the owner's rights."""

    def __init__(self, wanted: dict[str, Any], uv: Uv) -> None:
        self.wanted = wanted
        self.path = wanted["path"]
        self.python = os.path.join(self.path, "bin", "python")
        self.unproved = os.path.join(self.path, UNPROVED)
        self.uv = uv
        if os.path.isabs(wanted["python"]):
            self.interpreter = [wanted["python"]]
        else:
            self.interpreter = [wanted["python"], "--python-preference", "only-managed"]

    def runs(self) -> bool:
        """Return whether the environment's Python runs and has the requested version."""
        return runs_version(self.python) == str(self.wanted["python_version"])

    def can_resolve(self) -> bool:
        """Return whether uv and the environment's Python are there."""
        return os.path.exists(self.uv.program) and self.runs()

    def made_for(self) -> str:
        """Return the version of Python that an environment was created for; empty if there is no environment."""
        made: str = minor(python_version(self.path))
        return made

    def is_fresh(self) -> bool:
        """Return whether the environment must be created or recreated."""
        return not self.runs() and self.made_for() != str(self.wanted["python_version"])

    def install(self, directory: str, *options: str, needs: list[str] | None = None) -> list[str]:
        """Install the lock, or the requirements where there is none, and return uv's plan.

        Args:
            directory: Where to write files for uv.
            options: More options for uv.
            needs: What projects need; where there is no lock, it is installed as well.
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
        plan: list[str] = plan_lines(self.uv.run(*arguments, place=self.path)[1])
        return plan

    def settle(self, directory: str, plan: list[str]) -> None:
        """Repair packages that the installation left damaged, and accept those that it cannot repair.

        Some wheels name other lengths than their files have. Some have a file in common with another package, which
        writes its own, or takes it along when it goes.
        """
        if not damaged(self.path):
            return
        # Files of an environment are those of the cache, by links: what was changed there may be changed here.
        plan = plan + self.install(directory, "--no-cache")
        installed = {normalised(line[2:].partition("==")[0]) for line in plan if line[0] in "+~"}
        there = dist_infos(self.path)
        for name in installed.intersection(damaged(self.path)):
            correct_record(there[name][1])

    def links(self) -> list[str]:
        """Return the options that name pages."""
        return [option for link in self.wanted["find_links"] for option in ("--find-links", link)]

    def texts(self, directory: str, needs: list[str]) -> tuple[str, list[str]]:
        """Write the requirements with what projects need, and the constraints.

        Returns:
            The file of the former and the options for the latter.
        """
        requirements = written(directory, "requirements.txt", "\n".join([*self.wanted["requirements"], *needs]))
        if not self.wanted["constraints"]:
            return requirements, []
        constraints = written(directory, "constraints.txt", "\n".join(self.wanted["constraints"]))
        return requirements, ["--constraints", constraints]

    def kept(self) -> list[str]:
        """Return the directories with the environment's previous contents, for another Python."""
        names = sorted(os.listdir(self.path)) if os.path.isdir(self.path) else []
        return [os.path.join(self.path, name) for name in names if IS_KEPT.fullmatch(name)]

    def surplus(self) -> list[str]:
        """Return the packages to remove."""
        if not ((self.wanted["exact"] or self.wanted["agreed"]) and self.wanted["lock"]):
            return []
        kept = named(self.wanted["lock"]) | needed(self.path)
        found = {name: entry for name, (_, entry) in dist_infos(self.path).items() if name not in kept}
        # Packages that are not from the index are in no set that workers agree on.
        return [
            name
            for name, entry in found.items()
            if (not editable(entry) if self.wanted["exact"] else from_index(entry))
        ]

    def beyond(self, lock: str) -> list[str]:
        """Return what the environment holds from the index beyond a lock, as name==version."""
        there = {} if self.is_fresh() else dist_infos(self.path)
        return [
            "%s==%s" % (name, version)
            for name, (version, entry) in there.items()
            if name not in pins(lock) and from_index(entry) and not self.is_forbidden(name)
        ]

    def is_forbidden(self, name: str) -> bool:
        """Return whether the environment must not have a package."""
        return bool(re.fullmatch(self.wanted["forbidden"], name))

    def report(self, plan: list[str], *, fresh: bool, overruled: list[str] | None = None) -> dict[str, Any]:
        """Return the state of the environment."""
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
        """Return what the environment's list asks for, as the role workspace reads it."""
        source = "%s (environment %s)" % (self.wanted["variable"], self.wanted["name"])
        if self.wanted["lock"]:
            return Listed("the lock file of " + source, [], pin_lines(self.wanted["lock"]), self.wanted["find_links"])
        names = ("requirements", "constraints", "find_links")
        return Listed(source, *(list(self.wanted[name]) for name in names))

    def record(self) -> dict[str, Any]:
        """Record the requirements of the environment's list in it."""
        write_listed(self.path, self.listed())
        return self.report([], fresh=False)

    def key(self) -> str:
        """Return a key that is equal for hosts that can share one set of packages."""
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
        """Do something with what the environment's projects need; see `honouring`.

        Raises:
            Fault: It goes with no set of packages.
        """
        if self.is_fresh():
            return attempt([]), []
        moving, source = self.wanted["moving"], self.listed().source
        done: tuple[Any, list[str]] = honouring(self.path, moving, source, attempt)
        return done

    def planned(self, directory: str, plan: list[str], needs: list[str]) -> list[str]:
        """Given what would change without projects, return what would change so that they still have what they need.

        Raises:
            Fault: No set of packages has it all.
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
        """Return the changes if there is no usable environment, without running a program."""
        pinned = ["%s==%s" % pin for pin in pins(self.wanted["lock"]).items()]
        plan = ["+ %s" % name for name in pinned or self.wanted["requirements"]]
        if os.path.lexists(os.path.join(self.path, "pyvenv.cfg")):
            plan.insert(0, "~ Python %s (was %s)" % (self.wanted["python_version"], self.made_for() or "unknown"))
        return self.report(plan, fresh=True)

    def resolve(self) -> str:
        """Return the text of a lock that satisfies the requirements, keeping installed versions as far as they do.

        What the environment's projects need, and what else it has from the index, is in it as well: other workers are
        to hold the same.
        """
        with tempfile.TemporaryDirectory() as directory:
            there = {} if self.is_fresh() else packages(self.path)
            # uv prefers what an output file already pins.
            output = written(directory, "lock.txt", "".join("%s==%s\n" % pin for pin in sorted(there.items())))

            def compiled(needs: list[str]) -> str:
                requirements, constraints = self.texts(directory, needs)
                return self.compiled(output, requirements, *constraints)

            lock: str = self.honouring(compiled)[0]
            lock += self.compiled_as_far_as_known(directory, self.beyond(lock))
        self.allow(lock)
        return lock

    def compiled(self, output: str, requirements: str, *options: str) -> str:
        """Have uv write the lock of a file of requirements to another file, and return its text."""
        arguments = ["pip", "compile", "--quiet", "--no-header", "--no-annotate", "--generate-hashes", *self.links()]
        arguments += ["--python", *self.interpreter, "--python-version", self.wanted["python_version"], *options]
        self.uv.run(*arguments, "--output-file", output, "--", requirements)
        with open(output, encoding="utf-8") as stream:
            return stream.read()

    def compiled_as_far_as_known(self, directory: str, pinned: list[str]) -> str:
        """Return the lock of packages, without those that the index has no longer: other workers cannot get them."""
        while pinned:
            names = written(directory, "beyond.txt", "\n".join(pinned))
            try:
                return self.compiled(os.path.join(directory, "beyond-lock.txt"), names, "--no-deps")
            except Fault as exc:
                unknown = {*NO_VERSION.findall(str(exc)), *NO_PACKAGE.findall(str(exc))}
                left = [pin for pin in pinned if pin.partition("==")[0] not in unknown]
                if left == pinned:
                    raise
                pinned = left
        return ""

    def allow(self, lock: str) -> None:
        """Reject a lock with forbidden packages.

        Raises:
            Fault: The lock has forbidden packages.
        """
        names = [name for name in pins(lock) if self.is_forbidden(name)]
        if names:
            raise Fault(
                "%s would get packages that it must not have: %s; request a build without them"
                % (self.path, ", ".join(names))
            )

    def make(self) -> None:
        """Create the environment, or make its Python run again; its contents for another Python are kept next to it.

        Raises:
            Fault: What exists there is not an environment.
        """
        if os.path.lexists(self.path) and not os.path.isdir(self.path):
            raise Fault(
                "%s is in the way: it is not a directory; move it elsewhere, or give the environment another path"
                % self.path
            )
        os.makedirs(self.path, mode=0o755, exist_ok=True)
        names = os.listdir(self.path)
        # An interrupted run may have kept everything and created nothing yet.
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
        """Give the environment its set of packages, and return its state and what was done.

        Raises:
            Fault: uv failed, or the proof did.
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
        return self.report(remade + plan + ["- %s" % name for name in gone], fresh=False)

    def prove(self) -> None:
        """Run the final check; until it passes, the environment counts as broken.

        Raises:
            Fault: It failed.
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
    """Reject an existing environment with another owner than the requested one.

    Raises:
        Fault: It does.
    """
    if os.path.lexists(path) and os.lstat(path).st_uid != account.pw_uid:
        raise Fault(
            "%s belongs to uid %d and not to %s; remove or rename it, or chown -R it to %s"
            % (path, os.lstat(path).st_uid, account.pw_name, account.pw_name)
        )


def give(path: str, account: pwd.struct_passwd) -> None:
    """Make the directory of an environment that somebody else than root is to own, where it is missing.

    Raises:
        Fault: Somebody else could influence what is created.
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
            return  # The owner has the right to create the directory.
        if os.path.islink(here) or entry.st_uid or entry.st_mode & 0o022:
            raise Fault("%s is writable by others than root; create %s yourself" % (here, path))
        if here == "/":
            break
        here = os.path.dirname(here)
    for each in missing:
        os.mkdir(each, 0o755)
    os.chown(path, account.pw_uid, account.pw_gid)


def brought(directory: str, version: str) -> str:
    """Return the program of a version that uv installed; empty if there is none that runs."""
    for path in sorted(glob.glob("%s/*-%s.*/bin/python%s" % (glob.escape(directory), version, version))):
        if runs_version(path) == version:
            return path
    return ""
