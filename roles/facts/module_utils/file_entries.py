"""One entry of the module managed_files, compared with what exists at the entry's path; supports Python 3.8."""

from __future__ import annotations

import base64
import contextlib
import grp
import os
import pwd
import re
import stat
from typing import Any

from ansible.module_utils.guarded_paths import Refused, followed, guarded, make_parents, open_directory
from ansible.module_utils.text_files import changed_lines

BEGIN, END = "# BEGIN tpu_ops", "# END tpu_ops"
#: A block: from a BEGIN line to the next END line. After a BEGIN line without an END line, the next BEGIN line starts
#: anew, so that no lines of others are included.
BLOCK = re.compile(r"^{0}\n(?:(?!{0}$).*\n)*?{1}$\n?".format(re.escape(BEGIN), re.escape(END)), re.MULTILINE)

#: Name and password in a URL.
LOGIN = re.compile(r"://[^/@\s'\"]*@")


def with_block(text: str, block: str) -> str:
    """Given a file's text, put the block between the marker lines; an empty block also removes the marker lines."""
    rest = BLOCK.sub("", text)
    if not block:
        return rest
    new = "%s\n%s\n%s\n" % (BEGIN, block.rstrip("\n"), END)
    if BLOCK.search(text):
        return BLOCK.sub(lambda _: new, text, count=1)
    return rest + ("\n" if rest and not rest.endswith("\n") else "") + new


def open_block(text: str) -> int:
    """Given a file's text, return the number of a BEGIN line without an END line; 0 if there is none."""
    # A complete block is replaced by the same number of empty lines, so that line numbers stay the same.
    rest = BLOCK.sub(lambda match: "\n" * match[0].count("\n"), text)
    return next((number for number, line in enumerate(rest.split("\n"), 1) if line == BEGIN), 0)


def block_in(text: str) -> str | None:
    """Given a file's text, return the block between the marker lines; empty if there are no marker lines.

    Return None if `with_block` would write this block in a different form.
    """
    if open_block(text):
        return None
    match = BLOCK.search(text)
    if not match:
        return ""
    block = match[0][len(BEGIN) + 1 :].rpartition(END)[0].rstrip("\n")
    return block if block and with_block(text, block) == text else None


def nothing_asked(entry: dict[str, Any]) -> bool:
    """Return whether an entry removes a block from a file that does not exist, so that nothing is to change."""
    return entry["state"] == "block" and entry["content"] == "" and not os.path.isfile(entry["path"])


def number(name: str, kind: str) -> int | None:
    """Return the uid or gid for a name or a number; None if there is no such account or group."""
    if name.isdigit():
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid if kind == "owner" else grp.getgrnam(name).gr_gid
    except KeyError:
        return None


class File:
    """One entry of managed_files, and what exists at its path."""

    def __init__(self, entry: dict[str, Any], *, check: bool) -> None:
        self.path = entry["path"]
        #: The path that is written. For a block in a symbolic link, this is the file that the link leads to.
        self.place = self.path
        self.state = entry["state"]
        self.entry = entry
        self.check = check
        self.binary = entry.get("base64") is not None
        self.content = entry["content"]
        if self.binary:
            # Binary content is kept as text, with bytes that are not UTF-8 as surrogates, so that both kinds are
            # handled alike.
            self.content = base64.b64decode(entry["base64"]).decode("utf-8", "surrogateescape")
        if not os.path.isabs(self.path) or os.path.normpath(self.path) == "/":
            raise Refused("the path is not absolute")
        if self.state == "block" and self.content is None:
            raise Refused("a block needs content")
        if (self.state == "link") != (entry["target"] is not None):
            raise Refused("target must be given for the state link, and for no other state")
        if entry["unless"] is not None and self.state != "block":
            raise Refused("unless can only be used with the state block")
        if entry["begins"] is not None and self.state != "absent":
            raise Refused("begins can only be used with the state absent")
        mode = entry["mode"] or ("0755" if self.state == "directory" else "0644")
        if not re.match(r"^[0-7]{3,4}$", mode):
            raise Refused("mode %r is not octal, such as '0644'" % mode)
        self.mode = int(mode, 8)
        self.ids = (number(entry["owner"] or "root", "owner"), number(entry["group"] or "root", "group"))
        for kind, found in (("owner", self.ids[0]), ("group", self.ids[1])):
            # In check mode, the account may not exist yet. None then counts as different from every existing owner.
            if found is None and not check and self.state not in ("link", "absent"):
                raise Refused("there is no %s %s on this host" % (kind, entry[kind] or "root"))
        self.look()
        if self.state == "block" and self.found is not None:
            self.keep_attributes(self.found)

    def keep_attributes(self, found: os.stat_result) -> None:
        """Keep owner, group and mode of the existing file unless the entry sets them."""
        if not self.entry["mode"]:
            self.mode = stat.S_IMODE(found.st_mode)
        self.ids = (
            self.ids[0] if self.entry["owner"] else found.st_uid,
            self.ids[1] if self.entry["group"] else found.st_gid,
        )

    def look(self) -> None:
        """Read what exists at the entry's path."""
        if self.state == "block" and os.path.islink(self.path):
            self.place = followed(self.path)
        self.parent, self.missing = open_directory(os.path.dirname(self.place))
        self.name = os.path.basename(os.path.normpath(self.place))
        self.found: os.stat_result | None = None
        try:
            if not self.missing:
                with contextlib.suppress(FileNotFoundError):
                    self.found = os.stat(self.name, dir_fd=self.parent, follow_symlinks=False)
            self.before = self.read()
        except Refused:
            self.close()
            raise

    def close(self) -> None:
        """Close the parent directory."""
        os.close(self.parent)

    def read(self) -> str | None:
        """Return what exists at the path: a file's text, a link's target, "" for a directory, None if nothing exists.

        Raises:
            Refused: The path is of another type, or of a type that the entry must not replace.
        """
        if self.found is None:
            if self.missing and self.state != "absent" and not guarded(self.parent):
                raise Refused(
                    "the directory %s is missing, and root does not create it where others can write; list it as an"
                    " entry with its owner" % os.path.dirname(self.path)
                )
            if self.state == "file" and self.content is None and not self.check:
                raise Refused("the file does not exist, and the entry has no content to create the file with")
            return None
        kind = self.found.st_mode
        if stat.S_ISLNK(kind):
            if self.state == "directory" and not guarded(self.parent):
                raise Refused("the path is a symbolic link in a place where others than root can create one; remove it")
            return str(os.readlink(self.name, dir_fd=self.parent))
        if stat.S_ISDIR(kind):
            if self.state in ("file", "block", "link"):
                raise Refused("the path is a directory and not a %s; move the directory away" % self.state)
            if self.state == "absent" and self.entry["begins"] is None and os.listdir(self.open()):
                raise Refused("the directory is not empty; move its files away")
            return ""
        if not stat.S_ISREG(kind) or self.state == "directory":
            raise Refused("the path exists and is not a %s; move away what exists there" % self.state)
        with os.fdopen(self.open(), encoding="utf-8", errors="surrogateescape", newline="") as stream:
            text: str = stream.read()
        line = open_block(text) if self.state == "block" else 0
        if line:
            raise Refused(
                "line %d, %s, has no %s after it; add that line where the block ends, or remove line %d with what"
                " belongs to it" % (line, BEGIN, END, line)
            )
        return text

    def open(self) -> int:
        """Open what exists at the path, without following a symbolic link."""
        return os.open(self.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self.parent)

    def is_file(self) -> bool:
        """Return whether a regular file exists at the path."""
        return self.found is not None and stat.S_ISREG(self.found.st_mode)

    def stays(self) -> bool:
        """Return whether an entry with `begins` must not remove the file, since its text begins differently."""
        begins = self.entry["begins"]
        return begins is not None and not (self.is_file() and (self.before or "").startswith(begins))

    def after(self) -> str | None:
        """Return what should exist at the path, in the form that `read` returns."""
        if self.state == "absent":
            return self.before if self.stays() else None
        if self.state == "directory":
            return ""
        if self.state == "link":
            return str(self.entry["target"])
        if self.state == "block":
            text = (self.before or "") if self.is_file() else ""
            unless = self.entry["unless"]
            taken = unless and not BLOCK.search(text) and re.search(unless, text, re.MULTILINE)
            return with_block(text, "" if taken else self.content)
        if self.content is None or (self.entry["once"] and self.found is not None):
            return self.before
        return str(self.content)

    def attributes(self) -> str:
        """Return owner, group and mode of what exists at the path, as one text that can be compared with `wanted`."""
        entry = self.found
        if entry is None or self.state in ("link", "absent"):
            return ""
        if stat.S_ISLNK(entry.st_mode) and self.state == "directory":
            entry = os.stat(self.name, dir_fd=self.parent)
            if not stat.S_ISDIR(entry.st_mode):
                raise Refused("the path is a symbolic link to something that is not a directory; remove the link")
        return "%d:%d %04o" % (entry.st_uid, entry.st_gid, stat.S_IMODE(entry.st_mode))

    def wanted(self) -> str:
        """Return the owner, group and mode that the entry asks for, in the form that `attributes` returns."""
        if self.state in ("link", "absent"):
            return ""
        return "%s:%s %04o" % (*self.ids, self.mode)

    def differs(self) -> bool:
        """Return whether anything is to be changed."""
        if self.entry["once"] and self.found is not None:
            return False
        if self.state == "block" and (self.before or "") == self.after() == BLOCK.sub("", self.before or ""):
            return False  # A file without a block is not changed, and its owner and mode are not either.
        if self.state == "link" and self.found is not None and not stat.S_ISLNK(self.found.st_mode):
            return True
        if self.state in ("file", "block") and self.found is not None and not self.is_file():
            return True
        same = self.state == "directory" and self.found is not None
        return self.attributes() != self.wanted() or not (same or self.before == self.after())

    def diff(self) -> dict[str, str]:
        """Return the change in the form of Ansible's diffs."""
        shown = self.path if self.place == self.path else "%s -> %s" % (self.path, self.place)
        before, after = self.before or "", self.after() or ""
        if self.state == "block":
            lines = changed_lines(shown, before, after)
            before, after = lines["before"], lines["after"]
        return {
            "before_header": ("%s %s" % (shown, self.attributes())).strip(),
            "after_header": ("%s %s" % (shown, self.wanted())).strip(),
            "before": "" if self.binary else LOGIN.sub("://***@", before),
            "after": "(not shown: not text)\n" if self.binary else LOGIN.sub("://***@", after),
        }

    def apply(self) -> None:
        """Change the host to match the entry."""
        if self.state == "absent":
            remove = os.rmdir if self.found and stat.S_ISDIR(self.found.st_mode) else os.unlink
            remove(self.name, dir_fd=self.parent)
            return
        self.parent, self.missing = make_parents(self.parent, self.missing), []
        if self.state == "directory":
            self.make_directory()
        elif self.state == "link":
            self.replace(lambda new: os.symlink(self.entry["target"], new, dir_fd=self.parent))
        elif self.content is None:
            if self.found and self.found.st_nlink > 1 and not guarded(self.parent):
                raise Refused("the file has other hard links, in a place where others than root can create them")
            self.own(self.open())
        else:
            self.replace(self.write)

    def make_directory(self) -> None:
        """Make the directory or correct its owner and mode."""
        if self.found is None:
            os.mkdir(self.name, 0o700, dir_fd=self.parent)
            self.own(self.open())
        else:
            self.own(
                os.open(self.name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.parent)
                if stat.S_ISLNK(self.found.st_mode)
                else self.open()
            )

    def own(self, handle: int) -> None:
        """Set owner, group and mode of an open file or directory, and close it."""
        try:
            os.fchown(handle, self.ids[0] or 0, self.ids[1] or 0)
            # The mode is set after the owner, since chown clears the set-user-ID bit.
            os.fchmod(handle, self.mode)
        finally:
            os.close(handle)

    def write(self, new: str) -> None:
        """Write the content to a new file with another name in the same directory."""
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=self.parent)
        with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape", newline="") as stream:
            stream.write(self.after() or "")
            stream.flush()
            os.fsync(stream.fileno())
            self.own(os.dup(stream.fileno()))

    def replace(self, make: Any) -> None:
        """Create a file or link under a random name, and rename it atomically to the entry's name."""
        new = ".%s.%s.new" % (self.name, os.urandom(8).hex())
        try:
            make(new)
            os.replace(new, self.name, src_dir_fd=self.parent, dst_dir_fd=self.parent)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(new, dir_fd=self.parent)
            raise
