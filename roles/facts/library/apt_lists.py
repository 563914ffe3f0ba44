#!/usr/bin/python
"""Module that refreshes apt's package lists and names the sources that cannot be read; runs on Python 3.8."""

from __future__ import annotations

import contextlib
import os
import re
import time

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: apt_lists
short_description: Refresh apt's package lists, and name the sources that cannot be read
description:
  - C(ansible.builtin.apt) does not say which source could not be read. The exception that it gets from python-apt is
    empty where a source does not answer.
  - Reads all sources, even if some fail. The lists are a cache, so that they never count as a change. Check mode
    does nothing.
  - A source that cannot be read is a failure where something needs it, otherwise a warning. Images come with sources
    of their own, whose keys expire.
options:
  required:
    description: Whether all sources are needed.
    type: bool
    default: false
  packages:
    description:
      - What is to be installed next. A source is needed if one of them, or of the packages that they depend on, comes
        from its server; all are if apt does not know where these come from, or does not say which source it is about.
    type: list
    elements: str
    default: []
  archive:
    description: Address of the archive that they are to come from, whichever others have packages of these names.
    type: str
    default: ""
  stamp:
    description: File whose time is that of the last refresh of all sources; it is removed where one cannot be read.
    type: path
    required: true
  lock_timeout:
    description: Seconds to wait for another program that refreshes the lists.
    type: int
    default: 300
author: [tpu_ops]
"""

EXAMPLES = r"""
- name: Refresh the package lists
  apt_lists:
    packages: [htop]
    stamp: /var/lib/apt/periodic/example-stamp
"""

RETURN = r"""
unread:
  description: What apt says of sources that it could not read.
  type: list
  returned: always
"""

#: apt-get update with retries: of itself, apt retries a failed download only for a short time, with growing pauses.
UPDATE = ("-q", "-o", "Acquire::Retries=3", "update")

#: apt-get install that only prints the URLs of packages. It fetches nothing and waits for no lock, and it does not take
#: names for regular expressions.
WHERE = ("-qq", "-y", "--print-uris", "-o", "Debug::NoLocking=1", "-o", "APT::Cmd::Pattern-Only=true", "install", "--")

#: The server in a URL, without login; in a file: URL, the topmost directory.
SERVER = re.compile(r"\b([a-z+]+:/+)(?:[^/\s'\"@]*@)?([^/\s'\"]+)")

#: apt's last message if sources failed; it names none of them.
SUM = "Some index files failed to download"

WAYS = (
    "run again once these sources can be read, or set mirrors in base_apt_mirrors (for deadsnakes: in"
    " python_deadsnakes_url, or set python_source: uv); if the image brought a source whose key has expired,"
    " renew the key, or remove the source below /etc/apt/sources.list.d if nothing is needed from it"
)


def unread(code: int, said: str) -> list[str]:
    """Given exit code and stderr of C(apt-get update), return one text for each source that apt could not read.

    The exit code is 0 also if a source did not answer: apt then continues with its older lists.
    """
    if code == 0 and "\nW: Failed to fetch " not in "\n" + said:
        return []
    found = re.findall(r"^(?:E: |W: (?=Failed to fetch |GPG error: ))(?:Failed to fetch )?(.+)", said, re.MULTILINE)
    texts = dict.fromkeys(" ".join(text.split()).rstrip(".:") for text in found if not text.startswith(SUM))
    return list(texts) or [said.strip() or "apt-get update ended with %d and said nothing" % code]


def update(module: AnsibleModule) -> list[str]:
    """Refresh apt's lists, and return the result of `unread`."""
    command = [module.get_bin_path("apt-get", required=True), *UPDATE]
    deadline = time.monotonic() + module.params["lock_timeout"]
    while True:
        code, _, said = module.run_command(command, environ_update={"LC_ALL": "C", "LANGUAGE": "C"})
        if "Could not get lock" not in said:
            return unread(code, said)
        if time.monotonic() > deadline:
            module.fail_json(msg="Failed to lock apt: %s" % "; ".join(unread(code, said)))
        time.sleep(1)  # polls for the lock until the deadline


def needed(module: AnsibleModule, packages: list[str], faults: list[str]) -> bool:
    """Return whether some of the packages come, or may come, from sources that apt could not read.

    Args:
        module: The module, which runs apt-get.
        packages: The packages to install.
        faults: The result of `unread`.
    """
    silent = [set(SERVER.findall(fault)) for fault in faults]
    if not packages or not all(silent):
        return bool(packages)
    code, said, _ = module.run_command([module.get_bin_path("apt-get", required=True), *WHERE, *packages])
    wanted = set(SERVER.findall("%s\n%s" % (said, module.params["archive"])))
    return code != 0 or not wanted.isdisjoint(set().union(*silent))


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "required": {"type": "bool", "default": False},
            "packages": {"type": "list", "elements": "str", "default": []},
            "archive": {"type": "str", "default": ""},
            "stamp": {"type": "path", "required": True},
            "lock_timeout": {"type": "int", "default": 300},
        },
        supports_check_mode=True,
    )
    if module.check_mode:
        module.exit_json(changed=False, unread=[])
    stamp, faults = module.params["stamp"], update(module)
    if not faults:
        os.makedirs(os.path.dirname(stamp), mode=0o755, exist_ok=True)
        with open(stamp, "a"):
            os.utime(stamp)
        os.chmod(stamp, 0o644)
        module.exit_json(changed=False, unread=[])
    with contextlib.suppress(FileNotFoundError):
        os.unlink(stamp)
    said = "apt cannot read all of its sources: %s; %s" % ("; ".join(faults), WAYS)
    if module.params["required"] or needed(module, module.params["packages"], faults):
        module.fail_json(msg=said, unread=faults)
    module.warn(said)
    module.exit_json(changed=False, unread=faults)


if __name__ == "__main__":
    main()
