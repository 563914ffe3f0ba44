#!/usr/bin/python
"""Module that includes the fleet's settings in git's configuration, and checks that git and ssh use them."""

from __future__ import annotations

import os
import pwd
import stat
from typing import Any

from ansible.module_utils.as_person import PersonFault, as_person
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.text_files import changed_lines, put, read
from ansible.module_utils.turns import GIT, take_turn
from ansible.module_utils.worker import output

DOCUMENTATION = r"""
module: git_includes
short_description: Include the fleet's configuration in git's, and check that git and ssh read it
description:
  - Adds C(config) of O(directory) to the end of /etc/gitconfig, and each person's file in its directory C(people) to
    the beginning of that person's ~/.gitconfig, which is written with the person's own rights. Everything else in these
    files stays and appears in no diff, since it may contain tokens. Anything that is not a regular file, or is larger
    than 1 MiB, is a fault.
  - Removes files that are not listed from the directories C(people) and C(keys), and the includes of them.
  - Fails if ssh does not use the host keys in O(directory), and warns about settings that something else overrides.
options:
  directory:
    description: Directory of the fleet's files.
    type: path
    required: true
  people:
    description: Login names of the people who have a file.
    type: list
    elements: str
    required: true
  keys:
    description: Names of the files of keys.
    type: list
    elements: str
    required: true
  settings:
    description: The settings that should apply to everybody.
    type: dict
    default: {}
  hosts:
    description: Host names whose keys are pinned.
    type: list
    elements: str
    default: []
  system:
    description: git's configuration for everybody.
    type: path
    default: /etc/gitconfig
author: [tpu_ops]
"""

EXAMPLES = r"""
- name: Include the fleet's configuration
  git_includes:
    directory: /etc/tpu_ops/git
    people: [ada]
    keys: []
    hosts: [github.com]
"""

RETURN = r"""
changed_paths:
  description: Files that were or would be changed or removed.
  type: list
  returned: always
"""

#: Time limit in seconds for the work in one person's home.
TIME_LIMIT = 60


def with_include(text: str, path: str, *, first: bool) -> str:
    """Add an include of a path to the text of a git configuration, at its beginning or its end, unless it is there."""
    if include_lines(text, path):
        return text
    section = "[include]\n\tpath = %s\n" % path
    if first:
        return section + text
    return text + ("\n" if text and not text.endswith("\n") else "") + section


def include_lines(text: str, path: str) -> list[int]:
    """Return the positions of the lines of a git configuration that include a path."""
    section, found = "", []
    for position, line in enumerate(text.splitlines()):
        bare = line.strip()
        if bare.startswith("["):
            section = bare.partition("]")[0].strip("[ ").lower()
        key, _, value = bare.partition("=")
        if section == "include" and key.strip().lower() == "path" and value.strip().strip('"') == path:
            found.append(position)
    return found


def without_include(text: str, path: str) -> str:
    """Remove the includes of a path from a git configuration, and the sections that become empty."""
    lines = text.splitlines(keepends=True)
    for position in reversed(include_lines(text, path)):
        del lines[position]
        before = position - 1
        last = position >= len(lines) or lines[position].lstrip().startswith("[")
        if before >= 0 and lines[before].strip().lower() == "[include]" and last:
            del lines[before]
    return "".join(lines)


def replace(path: str, text: str) -> None:
    """Replace a file, or the target of a link, atomically and keep the mode. Empty text removes the file."""
    path = os.path.realpath(path)
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except FileNotFoundError:
        mode = 0o644
    if not text:
        os.unlink(path)
        return
    put(path, text, mode)


def mend(file: str, include: str, *, wanted: bool, first: bool, check: bool) -> dict[str, str] | None:
    """Add or remove the include of a path in one git configuration; return the diff, or None if nothing changes.

    Raises:
        OSError: The configuration is not a regular file, or cannot be read or written.
    """
    before = read(file)
    after = with_include(before, include, first=first) if wanted else without_include(before, include)
    if after == before:
        return None
    target = os.path.realpath(file)
    if os.path.islink(file) and not os.path.isdir(os.path.dirname(target)):
        raise OSError(
            "the file is a link to %s, whose directory is missing; create the directory, or remove the link" % target
        )
    if not check:
        replace(file, after)
    diff: dict[str, str] = changed_lines(file, before, after)
    return diff


def names_in(directory: str) -> list[str]:
    """Return the names of the files in a directory; empty if the directory does not exist."""
    return sorted(os.listdir(directory)) if os.path.isdir(directory) else []


def overridden(listing: str, settings: dict[str, Any]) -> list[str]:
    """Return a text for each of the settings that is missing or different in the output of `git config --list -z`."""
    found = {}
    for entry in listing.split("\0"):
        key, _, value = entry.partition("\n")
        found[key.lower()] = value
    shown = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in settings.items()}
    return [
        "%s is %s, not %s" % (key, found.get(key.lower(), "not set"), value)
        for key, value in sorted(shown.items())
        if found.get(key.lower()) != value
    ]


def unpinned(hosts: list[str], known_hosts: str) -> list[str]:
    """Return the hosts whose host keys ssh does not read from the file `known_hosts`."""
    wrong = []
    for host in hosts:
        told = output("ssh", "-G", "-F", "/etc/ssh/ssh_config", host)
        if "globalknownhostsfile %s" % known_hosts not in told.splitlines():
            wrong.append(host)
    return wrong


class Includes:
    """Makes /etc/gitconfig and each user's ~/.gitconfig include the fleet's files; collects diffs and faults."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.check = module.check_mode
        self.directory = module.params["directory"]
        self.diffs: list[dict[str, str]] = []
        self.faults: list[str] = []

    def mend_system(self) -> None:
        """Include the fleet's configuration in /etc/gitconfig."""
        path = self.module.params["system"]
        try:
            diff = mend(path, os.path.join(self.directory, "config"), wanted=True, first=False, check=self.check)
        except OSError as exc:
            self.faults.append("%s: %s" % (path, exc))
        else:
            self.diffs += [diff] if diff else []

    def mend_person(self, name: str, *, wanted: bool) -> None:
        """Add or remove the include of the fleet's file for a person in the person's ~/.gitconfig."""
        try:
            account = pwd.getpwnam(name)
        except KeyError:
            # The account was removed, or check mode has not created it, so there is no ~/.gitconfig to change.
            if wanted and not self.check:
                self.faults.append(
                    "git_people: %s has no account; create one, or remove the entry from the list" % name
                )
            return
        own, include = os.path.join(account.pw_dir, ".gitconfig"), os.path.join(self.directory, "people", name)
        try:
            diff = as_person(
                account, lambda: mend(own, include, wanted=wanted, first=True, check=self.check), seconds=TIME_LIMIT
            )
        except PersonFault as exc:
            self.faults.append("%s of git_people %s: %s" % (own, name, exc))
        else:
            self.diffs += [diff] if diff else []

    def remove_others(self, directory: str, names: list[str]) -> None:
        """Remove the files in one of the fleet's directories whose names are not listed."""
        for name in names_in(os.path.join(self.directory, directory)):
            if name in names:
                continue
            path = os.path.join(self.directory, directory, name)
            self.diffs.append({"before_header": path, "after_header": "", "before": "listed\n", "after": ""})
            if not self.check:
                os.unlink(path)

    def prove(self) -> None:
        """Check that ssh uses the fleet's host keys, and that git's system configuration has the fleet's settings."""
        known_hosts, system = os.path.join(self.directory, "known_hosts"), self.module.params["system"]
        if not os.path.exists(known_hosts):
            return
        for host in unpinned(self.module.params["hosts"], known_hosts):
            self.faults.append(
                "ssh to %s does not use the host keys in %s; /etc/ssh/ssh_config must begin with"
                " Include /etc/ssh/ssh_config.d/*.conf" % (host, known_hosts)
            )
        listing = output("git", "config", "--file", system, "--includes", "--null", "--list")
        for text in overridden(listing, self.module.params["settings"]) if listing else []:
            self.module.warn("%s: %s, because of another setting there" % (system, text))


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "directory": {"type": "path", "required": True},
            "people": {"type": "list", "elements": "str", "required": True},
            # no_log is set because Ansible would take the values of an option `keys` for secrets; they are names of
            # files.
            "keys": {"type": "list", "elements": "str", "required": True, "no_log": False},
            "settings": {"type": "dict", "default": {}},
            "hosts": {"type": "list", "elements": "str", "default": []},
            "system": {"type": "path", "default": "/etc/gitconfig"},
        },
        supports_check_mode=True,
    )
    take_turn(module, GIT)
    includes, people = Includes(module), module.params["people"]
    includes.mend_system()
    for name in sorted({*people, *names_in(os.path.join(includes.directory, "people"))}):
        includes.mend_person(name, wanted=name in people)
    includes.remove_others("people", people)
    includes.remove_others("keys", module.params["keys"])
    # After changes in check mode the check is skipped, since it would read files that were not written.
    if not (module.check_mode and includes.diffs):
        includes.prove()
    changed_paths = [diff["before_header"] for diff in includes.diffs]
    if includes.faults:
        module.fail_json(msg="; ".join(includes.faults), changed=bool(changed_paths), changed_paths=changed_paths)
    module.exit_json(changed=bool(changed_paths), changed_paths=changed_paths, diff=includes.diffs)


if __name__ == "__main__":
    main()
