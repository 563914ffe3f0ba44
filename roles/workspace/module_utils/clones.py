"""Clones of projects, and what is in them and nowhere else; runs on Python 3.8 in a process of the owner."""

from __future__ import annotations

import os
from typing import Any

from ansible.module_utils.as_person import PersonFault
from ansible.module_utils.programs import Git, program

#: What was checked out here; a commit that a rewritten branch has left is known by it to be nobody's own work.
DEPLOYED = "refs/tpu_ops/deployed"

#: Ignored files that programs make again.
CACHES = ("__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".ipynb_checkpoints")

#: Names of files in a message.
SHOWN = 10


def listed(names: list[str]) -> str:
    """Return names in one line, the first few of many."""
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (" and %d more" % rest if rest > 0 else "")


def is_cache(name: str) -> bool:
    """Return whether an ignored file or directory is one that programs make again."""
    parts = name.rstrip("/").split("/")
    return parts[-1].endswith((".pyc", ".egg-info")) or any(part in CACHES for part in parts)


class Local:
    """What is in a clone and nowhere else."""

    def __init__(self, git: Git, *, everything: bool = False) -> None:
        """Ask git.

        Args:
            git: git in the clone.
            everything: Whether also what another commit does not touch counts: other branches and ignored files.
        """
        options = ["--porcelain", "-z", "--no-renames", "--untracked-files=normal"] + ["--ignored"] * everything
        entries = [(entry[:2], entry[3:]) for entry in git("status", *options).split("\0") if entry]
        self.changed = [name for kind, name in entries if kind not in ("??", "!!")]
        self.unknown = [name for kind, name in entries if kind == "??"]
        self.ignored = [name for kind, name in entries if kind == "!!" and not is_cache(name)]
        heads = (["--branches"] if everything else []) + (["HEAD"] if head(git) else [])
        published = ["--not", "--remotes", "--tags", "--glob=" + DEPLOYED]
        self.commits = git("log", "--format=%h %s", *heads, *published).splitlines() if heads else []
        self.stashes = git("stash", "list", "--format=%gd %s").splitlines()


def head(git: Git) -> str:
    """Return the commit that a clone is at; empty where it is at none."""
    return git("rev-parse", "HEAD").strip() if git.has("rev-parse", "--quiet", "--verify", "HEAD") else ""


class Clone:
    """One clone. Everything raises PersonFault where git refuses it."""

    def __init__(self, path: str, owner: str, timeout: int) -> None:
        self.path = path
        self.owner = owner
        self.timeout = timeout
        self.git = Git(path, timeout)

    def must_be_own(self) -> None:
        """Refuse whatever else stands there.

        Raises:
            PersonFault: It is no clone, or somebody else's.
        """
        if not os.path.exists(os.path.join(self.path, ".git")):
            raise PersonFault("%s is in the way: it is not empty and no clone; move it elsewhere" % self.path)
        uid = os.lstat(self.path).st_uid
        if uid != os.geteuid():
            raise PersonFault(
                "%s belongs to uid %d and not to %s; chown -R it, or set owner" % (self.path, uid, self.owner)
            )

    def make(self, url: str, commit: str) -> None:
        """Clone into an empty directory."""
        program(["git", "clone", "--quiet", "--no-checkout", "--", url, self.path], self.timeout)
        self.check_out(commit)

    def check_out(self, commit: str) -> None:
        """Fetch a commit where it is missing, and put it into the working tree."""
        present = ("cat-file", "-e", commit + "^{commit}")
        if not self.git.has(*present):
            self.git("fetch", "--quiet", "--tags", "--force", "origin")
        if not self.git.has(*present):
            # The branch was rewritten since; forges hand out commits that they still have.
            self.git("fetch", "--quiet", "origin", commit)
        self.git("-c", "advice.detachedHead=false", "checkout", "--quiet", "--detach", commit)
        self.git("update-ref", DEPLOYED, commit)

    def move(self, url: str, commit: str, *, check: bool) -> dict[str, Any]:
        """Bring the clone to a commit, unless it has local changes.

        Args:
            url: The remote.
            commit: The commit; empty where it is not known.
            check: Whether to look only.

        Returns:
            C(actions) and C(warnings) as lists, C(kept) that says why the clone stays, and the C(commit) it is at then.
        """
        self.must_be_own()
        actions, warnings = [], []
        if self.git("config", "--get", "remote.origin.url").strip() != url:
            actions.append("take %s as the remote" % url)
            if not check:
                self.git("remote", "set-url", "origin", url)
        now, local = head(self.git), Local(self.git)
        away = commit not in ("", now)
        kinds = {
            "changed files": local.changed,
            "commits that its remote does not have": local.commits if away else [],
        }
        kept = "; ".join("%s: %s" % (kind, listed(names)) for kind, names in kinds.items() if names)
        if kept:
            kept = (
                "%s has %s. It stays at %s, as it is. Commit and push what is of use, or put it aside with git stash,"
                " and run again" % (self.path, kept, now[:12])
            )
        elif away:
            actions.append("move from %s to %s" % (now[:12] or "no commit", commit))
            if not check:
                self.check_out(commit)
            now = commit
        if local.unknown:
            warnings.append("%s has files that git does not know; they stay: %s" % (self.path, listed(local.unknown)))
        return {"actions": actions, "warnings": warnings, "kept": kept, "commit": now}

    def must_be_empty_of_work(self) -> None:
        """Refuse a clone that may not be removed.

        Raises:
            PersonFault: Something in it is nowhere else.
        """
        self.must_be_own()
        local = Local(self.git, everything=True)
        kinds = {
            "changed files": local.changed,
            "files that git does not know": local.unknown,
            "files that git ignores": local.ignored,
            "commits that its remote does not have": local.commits,
            "stashes": local.stashes,
        }
        kept = "; ".join("%s: %s" % (kind, listed(names)) for kind, names in kinds.items() if names)
        if kept:
            raise PersonFault(
                "%s is not removed, since it has %s. Push or move what is of use, remove the rest, and run again"
                % (self.path, kept)
            )
