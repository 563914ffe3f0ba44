#!/usr/bin/python
"""Module that keeps people's credentials where programs look for them; runs on Python 3.8."""

from __future__ import annotations

import os
import pwd
import re
import stat
from typing import Any, Callable, Dict
from urllib.parse import quote, unquote

from ansible.module_utils.as_person import PersonFault, as_person
from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: person_credentials
short_description: Keep people's credentials where programs look for them
description:
  - Works in each home with the rights of its owner. Files are replaced at once and are mode 0600; directories that are
    missing are made with mode 0700.
  - What else stands in a file stays as it is. A file that is empty after an entry was removed goes.
  - What cannot be written is returned as O(faults) and does not fail, so that a task with C(no_log) can be followed by
    one that says why. Nothing returned holds a secret.
options:
  entries:
    description: The credentials.
    type: list
    elements: dict
    required: true
    suboptions:
      person:
        description: Login name.
        type: str
        required: true
      kind:
        description: Which file it goes to, and in which form.
        type: str
        required: true
        choices: [wandb, huggingface, aws, git, netrc, file]
      secret:
        description: API key, token, secret access key, password or text.
        type: str
      host:
        description: Host of V(wandb), V(git) and V(netrc).
        type: str
      login:
        description: User name, or access key id.
        type: str
      session_token:
        description: Session token of V(aws).
        type: str
      profile:
        description: Profile of V(aws).
        type: str
        default: default
      path:
        description: Path below the home of V(file).
        type: str
      state:
        description: Whether it is to be there.
        type: str
        choices: [present, absent]
        default: present
author: [tpu_ops]
"""

EXAMPLES = r"""
- name: Write credentials
  person_credentials:
    entries:
      - { person: ada, kind: wandb, host: api.wandb.ai, login: user, secret: "{{ vault_wandb_ada }}" }
  no_log: true
"""

RETURN = r"""
changed_paths:
  description: Files that were or would be changed; in check mode the home of who has no account yet, as C(~NAME).
  type: list
  returned: always
notes:
  description: Lines of people's own in a file of git's that git passes over, by file and number.
  type: list
  returned: always
faults:
  description: What could not be written, and why.
  type: list
  returned: always
"""

Entry = Dict[str, Any]
#: Given a file's text, return the text that is to stand there.
Edit = Callable[[str], str]

#: An argument in a netrc: quoted within its line, or up to the next space; a password may begin with `#` or `"`.
ARGUMENT = re.compile(r'"(?:\\.|[^"\\\n])*"(?!\S)|\S+')
#: A word where none is awaited: `#` begins a comment.
WORD = re.compile(r"#[^\n]*|" + ARGUMENT.pattern)
PARTS = ("machine", "default", "macdef")
#: A line of ~/.git-credentials that is for a whole host (credential_from_url of git): login and host.
WHOLE_HOST = re.compile(r"\s*https://([^:@/]*)(?::[^@/]*)?@([^/?#]+)/?\s*")

#: A line of ~/.git-credentials that git reads at all (credential_from_url_gently of git): it has login and secret.
READ_BY_GIT = re.compile(r"[^:/\s][^:/]*://[^:@/?#]*:[^@/?#]*@.*")


def netrc_entries(text: str) -> list[tuple[int, int, list[str]]]:
    """Given the text of a netrc, return start, end and words of each of its parts: machine, default and macdef.

    A macdef's body reaches to the next empty line (the netrc of ftp(1)). A part ends with its last word's line.
    """
    parts: list[tuple[int, int, list[str]]] = []
    position, argument = 0, False
    while True:
        match = (ARGUMENT if argument else WORD).search(text, position)
        if match is None:
            return parts
        word = match[0]
        # An argument that was forgotten at the end of its line costs no other entry.
        argument = argument and not (word in PARTS and "\n" in text[position : match.start()])
        position = match.end()
        if word.startswith("#") and not argument:
            continue
        end = position + 1 if text[position : position + 1] == "\n" else position
        if not argument and word in PARTS:
            if word == "macdef":
                blank = re.compile(r"\n[ \t]*\n").search(text, position)
                position = end = blank.end() if blank else len(text)
            parts.append((match.start(), end, [word]))
        elif parts:
            start, _, words = parts[-1]
            bare = word[1:-1] if word.startswith('"') and word.endswith('"') and len(word) > 1 else word
            parts[-1] = (start, end, [*words, bare])
        argument = not argument and word in ("machine", "login", "account", "password")


def netrc_edit(host: str, login: str | None, secret: str | None) -> Edit:
    """Return the edit that makes a host's one entry in a netrc; without a login it removes the host's entries."""

    def edit(text: str) -> str:
        own = [part for part in netrc_entries(text) if part[2][:2] == ["machine", host]]
        wanted = ["machine", host, "login", login, "password", secret]
        if login is not None and len(own) == 1 and own[0][2] == wanted:
            return text
        for start, end, _ in reversed(own):
            text = text[:start] + text[end:]
        if login is None:
            return text
        block = "machine %s\n  login %s\n  password %s\n" % (host, login, secret)
        # Nothing after the default is read.
        where = min((start for start, _, words in netrc_entries(text) if words[0] == "default"), default=len(text))
        before = text[:where]
        return before + ("\n" if before and not before.endswith("\n") else "") + block + text[where:]

    return edit


def aws_edit(profile: str, values: dict[str, str | None]) -> Edit:
    """Return the edit that sets keys of one profile; None removes a key, and the profile where none is left."""

    def edit(text: str) -> str:
        lines = text.splitlines()
        heads = [position for position, line in enumerate(lines) if line.lstrip().startswith("[")]
        start = next((head for head in heads if lines[head].partition("]")[0].strip(" [") == profile), None)
        wanted = {key: value for key, value in values.items() if value is not None}
        if start is None:
            if not wanted:
                return text
            lines += ([""] if lines and lines[-1].strip() else []) + ["[%s]" % profile]
            start, end = len(lines) - 1, len(lines)
        else:
            end = next((head for head in heads if head > start), len(lines))
        body, seen = [], set()
        for line in lines[start + 1 : end]:
            key = (
                line.partition("=")[0].strip().lower()
                if "=" in line and not line.lstrip().startswith(("#", ";"))
                else ""
            )
            if key not in values:
                body.append(line)
            elif key in wanted and key not in seen:
                seen.add(key)
                same = line.partition("=")[2].strip() == wanted[key]
                body.append(line if same else "%s = %s" % (key, wanted[key]))
        missing = ["%s = %s" % (key, wanted[key]) for key in values if key in wanted and key not in seen]
        # New keys stand before the blank lines that part profiles.
        filled = len(body)
        while filled and not body[filled - 1].strip():
            filled -= 1
        body[filled:filled] = missing
        head = [] if not wanted and not any(line.strip() for line in body) else [lines[start]]
        after = lines[:start] + head + (body if head else []) + lines[end:]
        return "\n".join(after) + "\n" if any(line.strip() for line in after) else ""

    return edit


def whole_host(line: str) -> tuple[str, str]:
    """Given a line of ~/.git-credentials, return login and host; empty where it is for a path, or is none for git."""
    match = WHOLE_HOST.fullmatch(line)
    return (unquote(match[1]), match[2].lower()) if match else ("", "")


def passed_over(text: str) -> list[int]:
    """Given the text of ~/.git-credentials, return the numbers of lines that git passes over; comments are meant so."""
    meant = {number: line for number, line in enumerate(text.split("\n"), 1) if line.strip() and line.strip()[0] != "#"}
    return [number for number, line in meant.items() if not READ_BY_GIT.fullmatch(line)]


def git_edits(host: str, login: str, secret: str | None) -> tuple[Edit, Edit]:
    """Return the edits of ~/.git-credentials (git-credential-store(1)) and, to be made after it, of ~/.gitconfig.

    The one line of this login on the host is made, or removed without a secret; lines of other logins and for paths
    stay, and git is told to read the file as long as there is one for the host.
    """
    wanted = [] if secret is None else ["https://%s:%s@%s" % (quote(login, safe=""), quote(secret, safe=""), host)]
    hosts_line = re.compile(r"https://([^/?#]*@)?%s([/?#]|\s*$)" % re.escape(host), re.IGNORECASE)
    left = ["unknown as long as the file was not read"]

    def edit(text: str) -> str:
        lines = text.splitlines()
        own = [line for line in lines if whole_host(line) == (login, host.lower())]
        # git takes the first line that fits.
        after = lines if own == wanted else wanted + [line for line in lines if line not in own]
        left[:] = [line for line in after if hosts_line.match(line.strip())]
        return text if after is lines else "".join(line + "\n" for line in after)

    return edit, lambda text: helper_edit(host, wanted=bool(left))(text) if wanted or not left else text


def helper_edit(host: str, *, wanted: bool) -> Edit:
    """Return the edit of ~/.gitconfig that has git read ~/.git-credentials for one host, or no longer."""
    section = '[credential "https://%s"]\n\thelper = store\n' % host

    def edit(text: str) -> str:
        if not wanted:
            return text.replace(section, "")
        return text if section in text else text + ("\n" if text and not text.endswith("\n") else "") + section

    return edit


def whole_edit(secret: str | None) -> Edit:
    """Return the edit that makes a text all there is in a file; nothing removes it."""
    return lambda _: "" if secret is None else secret if secret.endswith("\n") else secret + "\n"


def edits(entry: Entry) -> list[tuple[str, Edit, int | None]]:
    """Given an entry, return the files below the home that it is about, each with its edit and its mode.

    A mode of None leaves that of a file that is there.

    Raises:
        PersonFault: There is nothing to write.
    """
    present = entry["state"] == "present"
    secret, login = (entry[name] if present else None for name in ("secret", "login"))
    kind, host = entry["kind"], entry["host"]
    if present and not secret:
        raise PersonFault("there is no secret")
    if kind in ("wandb", "netrc"):
        return [(".netrc", netrc_edit(host, login, secret), 0o600)]
    if kind == "huggingface":
        return [(".cache/huggingface/token", whole_edit(secret), 0o600)]
    if kind == "aws":
        token = entry["session_token"] if present else None
        values = {"aws_access_key_id": login, "aws_secret_access_key": secret, "aws_session_token": token}
        return [(".aws/credentials", aws_edit(entry["profile"], values), 0o600)]
    if kind == "git":
        lines, helper = git_edits(host, entry["login"], secret)
        return [(".git-credentials", lines, 0o600), (".gitconfig", helper, None)]
    return [(entry["path"], whole_edit(secret), 0o600)]


def look(path: str) -> tuple[str, int | None]:
    """Return a file's text and mode; no text and no mode where there is none.

    Raises:
        PersonFault: Something else stands there.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return "", None
    with os.fdopen(handle, encoding="utf-8", errors="surrogateescape", newline="") as stream:
        found = os.fstat(stream.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise PersonFault("%s is not a regular file" % path)
        if found.st_uid != os.geteuid():
            raise PersonFault("%s belongs to somebody else (uid %d)" % (path, found.st_uid))
        return stream.read(), stat.S_IMODE(found.st_mode)


def write(path: str, text: str, mode: int) -> None:
    """Replace a file at once; directories that are missing are for the person alone."""
    path = os.path.realpath(path)
    umask = os.umask(0o077)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
    finally:
        os.umask(umask)
    new = "%s.%s.new" % (path, os.urandom(8).hex())
    handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape", newline="") as stream:
            stream.write(text)
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
        os.replace(new, path)
    except BaseException:
        os.unlink(new)
        raise


def keep(home: str, entries: list[Entry], check: bool) -> dict[str, list[str]]:
    """Bring the files of one home to a person's entries; return which changed, what could not be, and odd lines."""
    changed: dict[str, None] = {}
    faults = []
    read_by_git: dict[str, str] = {}
    # Several entries may be about one file, which is to be seen as the earlier ones left it, in check mode as well.
    texts: dict[str, tuple[str, int | None]] = {}
    for entry, name, edit, secret_mode in [(each, *part) for each in entries for part in edits(each)]:
        path = os.path.join(home, name)
        try:
            before, mode = texts.get(path) or look(path)
            after = edit(before)
            if name == ".git-credentials":
                read_by_git[path] = after
            wanted = secret_mode or mode or 0o644
            if after == before and mode in (wanted, None):
                continue
            gone = bool(before) and not after
            if gone and not check:
                os.unlink(os.path.realpath(path))
            elif not check:
                write(path, after, wanted)
            texts[path] = (after, None if gone else wanted)
            changed[path] = None
        except (PersonFault, OSError) as exc:
            reason = exc if isinstance(exc, PersonFault) else "%s: %s" % (path, exc.strerror)
            faults.append("%s of %s: %s" % (entry["kind"], entry["person"], reason))
    reason = "line %d: git passes over it, and reads https://LOGIN:SECRET@HOST"
    notes = ["%s, %s" % (path, reason % line) for path, text in read_by_git.items() for line in passed_over(text)]
    return {"changed": list(changed), "faults": faults, "notes": notes}


def main() -> None:
    """Run the module."""
    kinds = ["wandb", "huggingface", "aws", "git", "netrc", "file"]
    module = AnsibleModule(
        argument_spec={
            "entries": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {
                    "person": {"type": "str", "required": True},
                    "kind": {"type": "str", "required": True, "choices": kinds},
                    "secret": {"type": "str", "no_log": True},
                    "host": {"type": "str"},
                    "login": {"type": "str"},
                    "session_token": {"type": "str", "no_log": True},
                    "profile": {"type": "str", "default": "default"},
                    "path": {"type": "str"},
                    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
                },
            },
        },
        supports_check_mode=True,
    )
    people: dict[str, list[Entry]] = {}
    for entry in module.params["entries"]:
        people.setdefault(entry["person"], []).append(entry)
    changed, faults, notes = [], [], []
    for name, entries in people.items():
        try:
            account = pwd.getpwnam(name)
        except KeyError:
            # Who has left takes the home along; in check mode the role users has not made the account yet.
            if any(entry["state"] == "present" for entry in entries):
                if module.check_mode:
                    changed.append("~%s" % name)
                else:
                    faults.append("%s has no account" % name)
            continue
        if not os.path.isdir(account.pw_dir):
            faults.append("the home of %s, %s, is missing" % (name, account.pw_dir))
            continue
        try:
            done = as_person(account, lambda: keep(account.pw_dir, entries, module.check_mode))  # noqa: B023
        except PersonFault as exc:
            faults.append("credentials of %s: %s" % (name, exc))
            continue
        changed += done["changed"]
        faults += done["faults"]
        notes += done["notes"]
    module.exit_json(changed=bool(changed), changed_paths=changed, faults=faults, notes=notes)


if __name__ == "__main__":
    main()
