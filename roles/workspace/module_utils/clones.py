"""Checkouts in projects' clones that lose no work of users; runs in a process with the owner's rights."""

from __future__ import annotations

import os
import stat
from typing import Any

from ansible.module_utils.as_person import PersonFault
from ansible.module_utils.programs import Git, at_remote, script

#: The ref of the last commit that the role checked out. If its branch is rewritten, this ref shows that the commit is
#: not somebody's work.
DEPLOYED = "refs/tpu_ops/deployed"

#: The ref of the commit that is being checked out. If an interrupted run leaves this ref, the working tree is a mixture
#: of two commits.
MOVING = "refs/tpu_ops/moving"

#: The ref of the last commit whose script (`Clone.run_script`) has ended well.
INSTALLED = "refs/tpu_ops/installed"

#: Names of ignored directories that programs recreate.
CACHES = ("__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".ipynb_checkpoints")

#: The maximum number of file names in a message.
SHOWN = 10


def listed(names: list[str]) -> str:
    """Return the first `SHOWN` names in one line, and the number of further names."""
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (" and %d more" % rest if rest > 0 else "")


def is_cache(name: str) -> bool:
    """Return whether programs recreate this ignored file or directory."""
    parts = name.rstrip("/").split("/")
    return parts[-1].endswith((".pyc", ".egg-info")) or any(part in CACHES for part in parts)


class Local:
    """Commits and files that exist only in a clone."""

    def __init__(self, git: Git, *, everything: bool = False) -> None:
        """Ask git for commits and files that exist only in the clone.

        Args:
            git: The program git, run in the clone.
            everything: Whether to include other branches and ignored files, which a checkout keeps but a removal loses.
        """
        options = ["--porcelain", "-z", "--no-renames", "--untracked-files=normal"]
        options += ["--ignored", "--ignore-submodules=none"] if everything else []
        entries = [(entry[:2], entry[3:]) for entry in git("status", *options).split("\0") if entry]
        self.changed = [name for kind, name in entries if kind not in ("??", "!!")]
        # setuptools writes *.egg-info next to the code of an editable installation, and recreates it.
        self.unknown = [name for kind, name in entries if kind == "??" and not name.endswith(".egg-info/")]
        self.ignored = [name for kind, name in entries if kind == "!!" and not is_cache(name)]
        self.hidden = hidden(git) if everything else []
        self.commits = unpublished(git, everything=everything)
        self.stashes = git("stash", "list", "--format=%gd %s").splitlines()


def hidden(git: Git) -> list[str]:
    """Return the existing files whose changes a user told git to ignore (git-update-index(1))."""
    marked = [entry for entry in git("ls-files", "-v", "-z").split("\0") if entry[:1] == "S" or entry[:1].islower()]
    return [entry[2:] for entry in marked if os.path.lexists(os.path.join(git.path, entry[2:]))]


def unpublished(git: Git, *, everything: bool) -> list[str]:
    """Return the commits that the remote never had, as one line with id and subject each.

    Args:
        git: The program git, run in the clone.
        everything: Whether to check all branches, tags and earlier commits of HEAD, and not only HEAD.

    Raises:
        PersonFault: git fails, for example because the remote does not answer.
    """
    heads = (["--branches", "--tags", "--reflog"] if everything else []) + (["HEAD"] if head(git) else [])
    published = ["--not", "--remotes", *git("for-each-ref", "--format=%(refname)", DEPLOYED).split()]
    if not everything:
        published.append("--tags")
    else:
        # Also published: earlier commits of the remote's branches, from before a rewrite, and all commits that the role
        # checked out.
        refs = git("for-each-ref", "--format=%(refname)", "refs/remotes", DEPLOYED).split()
        once = {commit for ref in refs for commit in git("reflog", "show", "--format=%H", ref, "--").split()}
        published += sorted(once)
    found: list[str] = git("log", "--format=%h %s", *heads, *published).splitlines() if heads else []
    if found and everything:
        # Ask the remote for its tags: a tag may exist only here, or also on the remote, at a commit that is on no
        # branch.
        asked = [line.partition("\t")[0] for line in git("ls-remote", "--tags", "origin").splitlines()]
        published += [commit for commit in asked if git.has("cat-file", "-e", commit + "^{commit}")]
        found = git("log", "--format=%h %s", *heads, *published).splitlines()
    return [str(line) for line in found]


def paths(text: str) -> set[str]:
    """Given git's output with a NUL after each path, return the paths."""
    return set(text.split("\0")) - {""}


def in_use(directory: str) -> bool:
    """Return whether a git process may be working in a directory or below it."""
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
            # The process belongs to another user, who may be able to write in the clone.
            return True
        if os.path.join(place, "").startswith(os.path.join(os.path.realpath(directory), "")):
            return True
    return False


def fetched_submodules(git: Git) -> list[tuple[str, Git]]:
    """Return the path in the clone, and git, for each submodule that exists in a clone, including nested submodules."""
    found = []
    for entry in sorted(paths(git("ls-files", "--stage", "-z"))):
        what, _, name = entry.partition("\t")
        inner = Git(os.path.join(git.path, name), git.timeout)
        if what.startswith("160000 ") and os.path.lexists(os.path.join(inner.path, ".git")):
            found += [(name, inner), *((name + "/" + deeper, each) for deeper, each in fetched_submodules(inner))]
    return found


def head(git: Git) -> str:
    """Return the commit of a clone's HEAD; empty if HEAD has no commit yet."""
    return git("rev-parse", "HEAD").strip() if git.has("rev-parse", "--quiet", "--verify", "HEAD") else ""


class Clone:
    """The clone of a project. Every method raises PersonFault if git fails."""

    def __init__(self, path: str, owner: str, timeout: int) -> None:
        self.path = path
        self.owner = owner
        self.timeout = timeout
        self.git = Git(path, timeout)

    def must_be_own(self) -> None:
        """Reject a path that is not a clone, or does not belong to the project's owner.

        Raises:
            PersonFault: The path is rejected.
        """
        if not os.path.exists(os.path.join(self.path, ".git")):
            raise PersonFault(
                "%s is in the way: it is not empty and not a clone; move the directory elsewhere" % self.path
            )
        for path in (self.path, os.path.join(self.path, ".git")):
            found = os.lstat(path)
            if found.st_uid != os.geteuid():
                raise PersonFault(
                    "%s belongs to uid %d and not to %s; chown -R it, or set owner" % (path, found.st_uid, self.owner)
                )
            if stat.S_ISLNK(found.st_mode):
                raise PersonFault("%s is a symbolic link; put the directory itself there" % path)
            # For root this is refused, since git runs programs that the clone's configuration names.
            if found.st_uid == 0 and found.st_mode & 0o022:
                raise PersonFault(
                    "others than root can write in %s, and could run programs as root through git; give the project an"
                    " owner who is not root, and check %s/.git/config before chown -R" % (path, self.path)
                )

    def make(self, url: str, commit: str) -> None:
        """Clone into an empty directory."""
        at_remote(["git", "clone", "--quiet", "--no-checkout", "--", url, self.path], self.timeout)
        self.fetch(commit)
        self.check_out(commit)

    def fetch(self, commit: str) -> None:
        """Fetch a commit, unless the clone already has it."""
        present = ("cat-file", "-e", commit + "^{commit}")
        if not self.git.has(*present):
            self.git.remote("fetch", "--quiet", "--tags", "--force", "origin")
        if not self.git.has(*present):
            # The branch was rewritten and no longer contains the commit. A forge may still have the commit, and returns
            # it by its id.
            self.git.remote("fetch", "--quiet", "origin", commit)

    def check_out(self, commit: str) -> None:
        """Check out a commit, unless this would overwrite files that git ignores."""
        self.put("--no-overwrite-ignore", commit)

    def put(self, how: str, commit: str) -> None:
        """Check out a commit, and record the checkout in the refs `MOVING` and `DEPLOYED`."""
        self.git("update-ref", MOVING, commit)
        self.git("-c", "advice.detachedHead=false", "checkout", "--quiet", "--detach", how, commit)
        # The ref gets a reflog: so it is known of all commits that were checked out here that they are from the remote.
        self.git("-c", "core.logAllRefUpdates=always", "update-ref", DEPLOYED, commit)
        self.git("update-ref", "-d", MOVING)

    def cut_short(self, commit: str) -> tuple[set[str], list[str]]:
        """Given the commit of an interrupted checkout, return the files that it replaced, and changes by somebody.

        git replaces the files first and the index last. So a file that differs from the old commit is a change by
        somebody unless it is missing, equal to the new commit's file, or the beginning of that.
        """
        before, after = self.files("HEAD"), self.files(commit)
        found = self.git.differing("HEAD") | {name for name in after - before if self.is_there(name)}
        others = {name for name in found if self.is_there(name)} - (after - self.git.differing(commit))
        work = {name for name in others if name not in after or not self.begins(commit, name)}
        work |= paths(self.git("diff", "--name-only", "--no-renames", "-z", "--cached", "HEAD", "--"))
        return found, sorted(work) + unpublished(self.git, everything=False)

    def files(self, commit: str) -> set[str]:
        """Return the paths of all files of a commit."""
        return paths(self.git("ls-tree", "-r", "-z", "--name-only", commit))

    def is_there(self, name: str) -> bool:
        """Return whether something exists at a path in the clone."""
        return os.path.lexists(os.path.join(self.path, name))

    def begins(self, commit: str, name: str) -> bool:
        """Return whether a file is a part of the commit's file, cut off before its end."""
        path = os.path.join(os.path.realpath(self.path), name)
        if os.path.realpath(path) != path or not os.path.isfile(path):
            return False
        with open(path, "rb") as stream:
            text = stream.read()
        whole = self.git.content(commit, name)
        return len(text) < len(whole) and bool(whole.startswith(text))

    def resume(self, *, check: bool) -> tuple[str, set[str], list[str]]:
        """Finish an interrupted checkout, unless somebody has changed the clone since.

        Returns:
            The commit, the files that the checkout replaced, and somebody's changes; all are empty if no checkout was
            interrupted.
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
        """Return the ignored files that a checkout of the commit would overwrite; none before the commit is fetched."""
        if not self.git.has("cat-file", "-e", commit + "^{commit}"):
            return []
        ignored = paths(self.git("ls-files", "-z", "--others", "--ignored", "--exclude-standard"))
        return sorted(ignored & self.files(commit))

    def moves(self, commit: str) -> bool:
        """Return whether `move` to a commit would change the clone, also because a checkout was interrupted."""
        self.must_be_own()
        return head(self.git) != commit or self.git.has("rev-parse", "--quiet", "--verify", MOVING)

    def move(self, url: str, commit: str, *, check: bool) -> dict[str, Any]:
        """Check out a commit, unless the clone has local changes.

        Args:
            url: The URL of the remote.
            commit: The commit to check out; empty if it is unknown.
            check: Whether to return the changes without making them.

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
            "files that git ignores and the checkout would overwrite": sorted(
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

    def script_to_run(self, names: list[str]) -> str:
        """Return the first program that the clone has; empty if it has none, or if one has run at this commit."""
        found = [
            name for name in names if os.path.isfile(path := os.path.join(self.path, name)) and os.access(path, os.X_OK)
        ]
        ran = self.git("for-each-ref", "--format=%(objectname)", INSTALLED).strip()
        return found[0] if found and ran != head(self.git) else ""

    def run_script(self, name: str) -> None:
        """Run a program of the clone in the clone, and record the commit."""
        now = head(self.git)
        script(os.path.join(self.path, name), self.timeout, self.path)
        self.git("update-ref", INSTALLED, now)

    def must_be_empty_of_work(self) -> None:
        """Reject the removal of a clone with work that exists nowhere else.

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
                ("files whose changes git was told to ignore", local.hidden),
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
