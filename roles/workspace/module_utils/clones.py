"""Clones of projects, and what is in them and nowhere else; runs on Python 3.8 in a process of the owner."""

from __future__ import annotations

import os
import stat
from typing import Any

from ansible.module_utils.as_person import PersonFault
from ansible.module_utils.programs import Git, at_remote

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
        # An editable installation by setuptools leaves its own record beside the code, and makes it anew.
        self.unknown = [name for kind, name in entries if kind == "??" and not name.endswith(".egg-info/")]
        self.ignored = [name for kind, name in entries if kind == "!!" and not is_cache(name)]
        self.hidden = hidden(git) if everything else []
        self.commits = unpublished(git, everything=everything)
        self.stashes = git("stash", "list", "--format=%gd %s").splitlines()


def hidden(git: Git) -> list[str]:
    """Return the files whose changes git was told not to see (git-update-index(1)), without those that are away."""
    marked = [entry for entry in git("ls-files", "-v", "-z").split("\0") if entry[:1] == "S" or entry[:1].islower()]
    return [entry[2:] for entry in marked if os.path.lexists(os.path.join(git.path, entry[2:]))]


def unpublished(git: Git, *, everything: bool) -> list[str]:
    """Return the commits that the remote never had, as lines for people.

    Args:
        git: git in the clone.
        everything: Whether branches, tags and what HEAD once was count too, not only what HEAD is.

    Raises:
        PersonFault: Only the remote can say whether a tag is its own, and it does not answer.
    """
    heads = (["--branches", "--tags", "--reflog"] if everything else []) + (["HEAD"] if head(git) else [])
    published = ["--not", "--remotes", *git("for-each-ref", "--format=%(refname)", DEPLOYED).split()]
    if not everything:
        published.append("--tags")
    else:
        # What the remote's branches were before they were rewritten, and what the role had checked out.
        refs = git("for-each-ref", "--format=%(refname)", "refs/remotes", DEPLOYED).split()
        once = {commit for ref in refs for commit in git("reflog", "show", "--format=%H", ref, "--").split()}
        published += sorted(once)
    found: list[str] = git("log", "--format=%h %s", *heads, *published).splitlines() if heads else []
    if found and everything:
        # A tag may be its owner's alone, or the remote's on a commit that is on no branch.
        asked = [line.partition("\t")[0] for line in git("ls-remote", "--tags", "origin").splitlines()]
        there = [commit for commit in asked if git.has("cat-file", "-e", commit + "^{commit}")]
        found = git("log", "--format=%h %s", *heads, *published, *there).splitlines()
    return [str(line) for line in found]


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
        for path in (self.path, os.path.join(self.path, ".git")):
            found = os.lstat(path)
            if found.st_uid != os.geteuid():
                raise PersonFault(
                    "%s belongs to uid %d and not to %s; chown -R it, or set owner" % (path, found.st_uid, self.owner)
                )
            if stat.S_ISLNK(found.st_mode):
                raise PersonFault("%s is a symbolic link; put the directory itself there" % path)
            # git runs what the configuration of a clone names.
            if found.st_uid == 0 and found.st_mode & 0o022:
                raise PersonFault(
                    "others than root may write in %s, and would be root through git; give the project an owner who is"
                    " not root, and look into %s/.git/config before chown -R" % (path, self.path)
                )

    def make(self, url: str, commit: str) -> None:
        """Clone into an empty directory."""
        at_remote(["git", "clone", "--quiet", "--no-checkout", "--", url, self.path], self.timeout)
        self.fetch(commit)
        self.check_out(commit)

    def fetch(self, commit: str) -> None:
        """Fetch a commit where it is missing."""
        present = ("cat-file", "-e", commit + "^{commit}")
        if not self.git.has(*present):
            self.git.remote("fetch", "--quiet", "--tags", "--force", "origin")
        if not self.git.has(*present):
            # The branch was rewritten since; forges hand out commits that they still have.
            self.git.remote("fetch", "--quiet", "origin", commit)

    def check_out(self, commit: str) -> None:
        """Put a commit into the working tree, over no file that git ignores there."""
        command = ("checkout", "--quiet", "--detach", "--no-overwrite-ignore", commit)
        self.git("-c", "advice.detachedHead=false", *command)
        # With its history: all that was ever checked out here came from the remote.
        self.git("-c", "core.logAllRefUpdates=always", "update-ref", DEPLOYED, commit)

    def in_the_way(self, commit: str) -> list[str]:
        """Return the files that git ignores here and a commit has; none where the commit is not here yet."""
        if not self.git.has("cat-file", "-e", commit + "^{commit}"):
            return []
        ignored = set(self.git("ls-files", "-z", "--others", "--ignored", "--exclude-standard").split("\0"))
        return sorted(ignored & set(self.git("ls-tree", "-r", "-z", "--name-only", commit).split("\0")) - {""})

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
        remote = self.git("config", "--default", "", "--get", "remote.origin.url").strip()
        if not remote:
            raise PersonFault(
                "%s has no remote origin; git -C %s remote add origin %s, or move it elsewhere"
                % (self.path, self.path, url)
            )
        if remote != url:
            actions.append("take %s as the remote" % url)
            if not check:
                self.git("remote", "set-url", "origin", url)
        now, local = head(self.git), Local(self.git)
        away = commit not in ("", now)
        if away and not check:
            self.fetch(commit)
        kinds = {
            "changed files": local.changed,
            "files that git ignores and the commit would overwrite": self.in_the_way(commit) if away else [],
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
            "files whose changes git was told not to see": local.hidden,
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
