"""Clones of projects, and work that exists only in them; runs on Python 3.8 in a process of the owner."""

from __future__ import annotations

import os
import stat
from typing import Any

from ansible.module_utils.as_person import PersonFault
from ansible.module_utils.programs import Git, at_remote

#: The ref of the last checkout: after its branch is rewritten, this commit must not be taken for somebody's work.
DEPLOYED = "refs/tpu_ops/deployed"

#: The ref of a checkout in progress. An interrupted run leaves it, with a tree that is a mixture of both commits.
MOVING = "refs/tpu_ops/moving"

#: Ignored files that programs recreate.
CACHES = ("__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".ipynb_checkpoints")

#: The most file names in a message.
SHOWN = 10


def listed(names: list[str]) -> str:
    """Return the first few names in one line, with the number of the others."""
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (" and %d more" % rest if rest > 0 else "")


def is_cache(name: str) -> bool:
    """Return whether an ignored file or directory is one that programs recreate."""
    parts = name.rstrip("/").split("/")
    return parts[-1].endswith((".pyc", ".egg-info")) or any(part in CACHES for part in parts)


class Local:
    """Commits and files that exist only in a clone."""

    def __init__(self, git: Git, *, everything: bool = False) -> None:
        """Ask git.

        Args:
            git: git in the clone.
            everything: Whether to include other branches and ignored files, which a checkout does not change.
        """
        options = ["--porcelain", "-z", "--no-renames", "--untracked-files=normal"]
        options += ["--ignored", "--ignore-submodules=none"] if everything else []
        entries = [(entry[:2], entry[3:]) for entry in git("status", *options).split("\0") if entry]
        self.changed = [name for kind, name in entries if kind not in ("??", "!!")]
        # An editable installation by setuptools leaves its own record next to the code, and recreates it.
        self.unknown = [name for kind, name in entries if kind == "??" and not name.endswith(".egg-info/")]
        self.ignored = [name for kind, name in entries if kind == "!!" and not is_cache(name)]
        self.hidden = hidden(git) if everything else []
        self.commits = unpublished(git, everything=everything)
        self.stashes = git("stash", "list", "--format=%gd %s").splitlines()


def hidden(git: Git) -> list[str]:
    """Return the files whose changes git was told to ignore (git-update-index(1)), except those that do not exist."""
    marked = [entry for entry in git("ls-files", "-v", "-z").split("\0") if entry[:1] == "S" or entry[:1].islower()]
    return [entry[2:] for entry in marked if os.path.lexists(os.path.join(git.path, entry[2:]))]


def unpublished(git: Git, *, everything: bool) -> list[str]:
    """Return the commits that the remote never had, one line each for a message.

    Args:
        git: git in the clone.
        everything: Whether to include branches, tags and earlier commits of HEAD, not only HEAD.

    Raises:
        PersonFault: The remote does not answer whether it has a tag.
    """
    heads = (["--branches", "--tags", "--reflog"] if everything else []) + (["HEAD"] if head(git) else [])
    published = ["--not", "--remotes", *git("for-each-ref", "--format=%(refname)", DEPLOYED).split()]
    if not everything:
        published.append("--tags")
    else:
        # The remote's branches before they were rewritten, and the commits that the role had checked out.
        refs = git("for-each-ref", "--format=%(refname)", "refs/remotes", DEPLOYED).split()
        once = {commit for ref in refs for commit in git("reflog", "show", "--format=%H", ref, "--").split()}
        published += sorted(once)
    found: list[str] = git("log", "--format=%h %s", *heads, *published).splitlines() if heads else []
    if found and everything:
        # A tag may exist only here, or on the remote at a commit that is on no branch.
        asked = [line.partition("\t")[0] for line in git("ls-remote", "--tags", "origin").splitlines()]
        published += [commit for commit in asked if git.has("cat-file", "-e", commit + "^{commit}")]
        found = git("log", "--format=%h %s", *heads, *published).splitlines()
    return [str(line) for line in found]


def paths(text: str) -> set[str]:
    """Return the paths that git printed, each ended by NUL."""
    return set(text.split("\0")) - {""}


def in_use(directory: str) -> bool:
    """Return whether a git process may be working below a directory."""
    for entry in os.listdir("/proc"):
        try:
            with open("/proc/%s/comm" % entry, encoding="utf-8") as stream:
                if stream.read().strip() != "git":
                    continue
        except OSError:
            continue
        try:
            place = os.readlink("/proc/%s/cwd" % entry)
        except FileNotFoundError:
            continue
        except PermissionError:
            # A process of another user, who may have the right to write here.
            return True
        if os.path.join(place, "").startswith(os.path.join(os.path.realpath(directory), "")):
            return True
    return False


def fetched_submodules(git: Git) -> list[tuple[str, Git]]:
    """Return the submodules that somebody has fetched into a clone, at all levels, each with its path in the clone."""
    found = []
    for entry in sorted(paths(git("ls-files", "--stage", "-z"))):
        what, _, name = entry.partition("\t")
        inner = Git(os.path.join(git.path, name), git.timeout)
        if what.startswith("160000 ") and os.path.lexists(os.path.join(inner.path, ".git")):
            found += [(name, inner), *((name + "/" + deeper, each) for deeper, each in fetched_submodules(inner))]
    return found


def head(git: Git) -> str:
    """Return the commit of a clone's HEAD; empty if there is none."""
    return git("rev-parse", "HEAD").strip() if git.has("rev-parse", "--quiet", "--verify", "HEAD") else ""


class Clone:
    """One clone. Every method raises PersonFault if git fails."""

    def __init__(self, path: str, owner: str, timeout: int) -> None:
        self.path = path
        self.owner = owner
        self.timeout = timeout
        self.git = Git(path, timeout)

    def must_be_own(self) -> None:
        """Reject a path that is not a clone of its owner.

        Raises:
            PersonFault: The path is not a clone, or belongs to another user.
        """
        if not os.path.exists(os.path.join(self.path, ".git")):
            raise PersonFault("%s is in the way: it is not empty and not a clone; move it elsewhere" % self.path)
        for path in (self.path, os.path.join(self.path, ".git")):
            found = os.lstat(path)
            if found.st_uid != os.geteuid():
                raise PersonFault(
                    "%s belongs to uid %d and not to %s; chown -R it, or set owner" % (path, found.st_uid, self.owner)
                )
            if stat.S_ISLNK(found.st_mode):
                raise PersonFault("%s is a symbolic link; put the directory itself there" % path)
            # git runs programs that the clone's configuration names.
            if found.st_uid == 0 and found.st_mode & 0o022:
                raise PersonFault(
                    "others than root can write in %s, and would become root through git; give the project an owner who"
                    " is not root, and check %s/.git/config before chown -R" % (path, self.path)
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
            # The branch was rewritten since. A forge returns the commit by its id if it still has it.
            self.git.remote("fetch", "--quiet", "origin", commit)

    def check_out(self, commit: str) -> None:
        """Put a commit into the working tree, without overwriting files that git ignores there."""
        self.put("--no-overwrite-ignore", commit)

    def put(self, how: str, commit: str) -> None:
        """Check a commit out, and record the start and the end of the checkout."""
        self.git("update-ref", MOVING, commit)
        self.git("-c", "advice.detachedHead=false", "checkout", "--quiet", "--detach", how, commit)
        # The ref has a reflog, so that every commit that was checked out here is known to come from the remote.
        self.git("-c", "core.logAllRefUpdates=always", "update-ref", DEPLOYED, commit)
        self.git("update-ref", "-d", MOVING)

    def cut_short(self, commit: str) -> tuple[set[str], list[str]]:
        """Return the files that an interrupted checkout has left, and the changes that somebody has made since.

        git replaces the files first and the index last. So each file that differs from the old commit is the new
        commit's file, or its beginning, or is missing.
        """
        before, after = self.files("HEAD"), self.files(commit)
        found = self.git.differing("HEAD") | {name for name in after - before if self.is_there(name)}
        others = {name for name in found if self.is_there(name)} - (after - self.git.differing(commit))
        work = {name for name in others if name not in after or not self.begins(commit, name)}
        work |= paths(self.git("diff", "--name-only", "--no-renames", "-z", "--cached", "HEAD", "--"))
        return found, sorted(work) + unpublished(self.git, everything=False)

    def files(self, commit: str) -> set[str]:
        """Return the paths of a commit's files."""
        return paths(self.git("ls-tree", "-r", "-z", "--name-only", commit))

    def is_there(self, name: str) -> bool:
        """Return whether something exists at a path in the clone."""
        return os.path.lexists(os.path.join(self.path, name))

    def begins(self, commit: str, name: str) -> bool:
        """Return whether a file is only the beginning of the commit's file."""
        path = os.path.join(os.path.realpath(self.path), name)
        if os.path.realpath(path) != path or not os.path.isfile(path):
            return False
        with open(path, "rb") as stream:
            text = stream.read()
        whole = self.git.content(commit, name)
        return len(text) < len(whole) and bool(whole.startswith(text))

    def resume(self, *, check: bool) -> tuple[str, set[str], list[str]]:
        """Finish an interrupted checkout, unless somebody has worked in the clone since.

        Returns:
            The commit, the files that the checkout left, and somebody's work; all empty without an interrupted
            checkout.
        """
        if not self.git.has("rev-parse", "--quiet", "--verify", MOVING) or not head(self.git):
            return "", set(), []
        lock = os.path.join(self.path, ".git", "index.lock")
        if not check and os.path.lexists(lock) and not in_use(self.path):
            os.unlink(lock)
        commit = self.git("rev-parse", MOVING).strip()
        left, work = self.cut_short(commit)
        if not check and left and not work:
            self.put("--force", commit)
        elif not check and not left:
            self.git("update-ref", "-d", MOVING)
        return (commit, left, work) if left else ("", set(), [])

    def in_the_way(self, commit: str) -> list[str]:
        """Return the files of a commit that git ignores here; none if the commit was not fetched yet."""
        if not self.git.has("cat-file", "-e", commit + "^{commit}"):
            return []
        ignored = paths(self.git("ls-files", "-z", "--others", "--ignored", "--exclude-standard"))
        return sorted(ignored & self.files(commit))

    def moves(self, commit: str) -> bool:
        """Return whether the clone has to move to reach a commit; an unfinished checkout counts too."""
        self.must_be_own()
        return head(self.git) != commit or self.git.has("rev-parse", "--quiet", "--verify", MOVING)

    def move(self, url: str, commit: str, *, check: bool) -> dict[str, Any]:
        """Move the clone to a commit, unless it has local changes.

        Args:
            url: The remote.
            commit: The commit; empty if it is unknown.
            check: Whether to look only.

        Returns:
            The lists `actions` and `warnings`, `kept` with the reason why the clone stays, and its final `commit`.
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
        resumed, left, work = self.resume(check=check)
        if left and not work:
            actions.append("finish the interrupted checkout of %s" % resumed)
        now, local = head(self.git) if work else resumed or head(self.git), Local(self.git)
        if check:
            local.changed = [name for name in local.changed if name not in left]
            local.unknown = [name for name in local.unknown if name not in left]
        away = commit not in ("", now)
        if away and not check and not work:
            self.fetch(commit)
        kinds = {
            "changed files": local.changed,
            "files that git ignores and the commit would overwrite": sorted(
                set(self.in_the_way(commit) if away else []) - left
            ),
            "commits that the remote does not have": local.commits if away else [],
        }
        if work:
            kinds = {"changes made during the interrupted checkout of %s" % resumed[:12]: work}
        kept = "; ".join("%s: %s" % (kind, listed(names)) for kind, names in kinds.items() if names)
        if kept:
            kept = (
                "%s has %s. It stays at %s, as it is. Commit and push what you need, or put it aside with git stash,"
                " and run again" % (self.path, kept, now[:12])
            )
        elif away:
            actions.append("move from %s to %s" % (now[:12] or "no commit", commit))
            if not check:
                self.check_out(commit)
            now = commit
        if local.unknown:
            warnings.append("%s has untracked files; they stay: %s" % (self.path, listed(local.unknown)))
        return {"actions": actions, "warnings": warnings, "kept": kept, "commit": now}

    def must_be_empty_of_work(self) -> None:
        """Reject a clone that must not be removed.

        Raises:
            PersonFault: The clone contains work that exists nowhere else.
        """
        self.must_be_own()
        everywhere = [("", Local(self.git, everything=True))]
        everywhere += [(name, Local(git, everything=True)) for name, git in fetched_submodules(self.git)]
        kinds: dict[str, list[str]] = {}
        for inside, local in everywhere:
            for kind, names in (
                ("changed files", local.changed),
                ("files whose changes git was told not to see", local.hidden),
                ("untracked files", local.unknown),
                ("files that git ignores", local.ignored),
            ):
                kinds.setdefault(kind, []).extend(os.path.join(inside, name) for name in names)
            for kind, lines in (("commits that the remote does not have", local.commits), ("stashes", local.stashes)):
                kinds.setdefault(kind, []).extend("%s in %s" % (line, inside) if inside else line for line in lines)
        kept = "; ".join("%s: %s" % (kind, listed(names)) for kind, names in kinds.items() if names)
        if kept:
            raise PersonFault(
                "%s is not removed, since it has %s. Push or move what you need, remove the rest, and run again"
                % (self.path, kept)
            )
