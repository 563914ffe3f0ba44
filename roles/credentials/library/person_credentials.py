#!/usr/bin/python
"""Module that keeps people's credentials where programs look for them; runs on Python 3.8."""

from __future__ import annotations

import os
import pwd
import stat
from typing import Any, Dict

from ansible.module_utils.as_person import PersonFault, as_person
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.credential_edits import Edit, aws_edit, git_edits, netrc_edit, passed_over, whole_edit
from ansible.module_utils.text_files import put

DOCUMENTATION = r"""
module: person_credentials
short_description: Keep people's credentials where programs look for them
description:
  - Works in each home with the rights of its owner. Files are replaced atomically and get mode 0600; missing
    directories are created with mode 0700.
  - Everything else in a file stays as it is. A file that is empty after an entry was removed is deleted.
  - What cannot be written is returned as O(faults) and is not a failure, so that a task with C(no_log) can be followed
    by one that reports the reasons. Nothing that is returned contains a secret.
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
        description: Whether the entry should exist.
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
  description: >-
    Files that were or would be changed; in check mode, for people without an account yet, their home as C(~NAME).
  type: list
  returned: always
notes:
  description: People's own lines in their git credentials file that git ignores, by file and number.
  type: list
  returned: always
faults:
  description: What could not be written, and why.
  type: list
  returned: always
"""

Entry = Dict[str, Any]

#: Time limit in seconds for the work in one person's home, since a FUSE mount in a home can block for ever.
TIME_LIMIT = 60


def edits(entry: Entry) -> list[tuple[str, Edit, int | None]]:
    """Given an entry, return the files that it changes, each as path below the home, edit and mode.

    A mode of None keeps the mode of an existing file.

    Raises:
        PersonFault: The entry has state present and no secret.
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
    """Return a file's text and mode; an empty text and None if the file does not exist.

    Raises:
        PersonFault: The path is not a regular file of this person.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return "", None
    with os.fdopen(handle, encoding="utf-8", errors="surrogateescape", newline="") as stream:
        found = os.fstat(stream.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise PersonFault("%s is not a regular file; move it away" % path)
        if found.st_uid != os.geteuid():
            raise PersonFault("%s belongs to somebody else (uid %d); chown it or move it away" % (path, found.st_uid))
        return stream.read(), stat.S_IMODE(found.st_mode)


def write(path: str, text: str, mode: int) -> None:
    """Replace a file atomically; missing directories are created with mode 0700."""
    path = os.path.realpath(path)
    umask = os.umask(0o077)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
    finally:
        os.umask(umask)
    put(path, text, mode)


def keep(home: str, entries: list[Entry], check: bool) -> dict[str, list[str]]:
    """Apply a person's entries to the files of one home; return changed files, faults and lines that git ignores."""
    changed: dict[str, None] = {}
    faults = []
    read_by_git: dict[str, str] = {}
    # Several entries may change one file. Each entry starts from the text that the earlier entries left, also in check
    # mode.
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
    reason = "git ignores line %d; git reads lines such as https://LOGIN:SECRET@HOST"
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
            # Either the person was removed, and the home too, or this is check mode, in which the role users creates no
            # accounts.
            if any(entry["state"] == "present" for entry in entries):
                if module.check_mode:
                    changed.append("~%s" % name)
                else:
                    faults.append("%s has no account; create one, or remove these entries from the list" % name)
            continue
        if not os.path.isdir(account.pw_dir):
            faults.append(
                "the home of %s, %s, is missing; create it: mkhomedir_helper %s" % (name, account.pw_dir, name)
            )
            continue
        try:
            done = as_person(
                account,
                lambda: keep(account.pw_dir, entries, module.check_mode),  # noqa: B023
                seconds=TIME_LIMIT,
            )
        except PersonFault as exc:
            faults.append("credentials of %s: %s" % (name, exc))
            continue
        changed += done["changed"]
        faults += done["faults"]
        notes += done["notes"]
    module.exit_json(changed=bool(changed), changed_paths=changed, faults=faults, notes=notes)


if __name__ == "__main__":
    main()
