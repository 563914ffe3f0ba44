#!/usr/bin/python
"""Module that downloads a package archive's key, checks the fingerprint and writes the key to a file."""

from __future__ import annotations

import os
import tempfile

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.openpgp import fingerprints
from ansible.module_utils.urls import fetch_url

DOCUMENTATION = r"""
module: signing_key
short_description: Fetch the key of a package archive once, check its fingerprint, and keep it in a file
description:
  - If the file holds only the key with this fingerprint, nothing is fetched. Otherwise the key is fetched, and written
    only if it is the only key in the answer.
options:
  url:
    description: URL of the key.
    type: str
    required: true
  fingerprint:
    description: Fingerprint of the key in hexadecimal digits.
    type: str
    required: true
  path:
    description: File in which the key is kept.
    type: path
    required: true
  ca_path:
    description: Certificates to trust when fetching the key.
    type: path
  timeout:
    description: Seconds to wait for the key.
    type: int
    default: 60
author: [tpu_ops]
"""

EXAMPLES = r"""
- name: Fetch the archive's key
  signing_key:
    url: https://archive.example/key.asc
    fingerprint: F23C5A6CF475977595C89F51BA6932366A755776
    path: /etc/apt/keyrings/example.asc
"""

RETURN = r"""
found:
  description: Fingerprints of the keys that were fetched.
  type: list
  returned: when a key was fetched
"""


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "required": True},
            "fingerprint": {"type": "str", "required": True},
            "path": {"type": "path", "required": True},
            "ca_path": {"type": "path"},
            "timeout": {"type": "int", "default": 60},
        },
        supports_check_mode=True,
    )
    url, path = module.params["url"], module.params["path"]
    wanted = module.params["fingerprint"].replace(" ", "").upper()
    try:
        with open(path, "rb") as stream:
            there = fingerprints(stream.read())
    except OSError:
        there = []
    if there == [wanted]:
        module.exit_json(changed=False)
    if module.check_mode:
        module.exit_json(changed=True)
    # The system's certificate authorities are used, so that the same proxies and mirrors are trusted as by apt and uv.
    bundle = module.params["ca_path"]
    options = {"ca_path": bundle} if bundle and os.path.exists(bundle) else {}
    answer, info = fetch_url(module, url, timeout=module.params["timeout"], **options)
    if info["status"] != 200:
        module.fail_json(
            msg="python_deadsnakes_key_url: %s returned no key: %s; set it to an address where this host can fetch"
            " the key" % (url, info["msg"])
        )
    key = answer.read()
    found = fingerprints(key)
    if found != [wanted]:
        module.fail_json(
            msg="python_deadsnakes_key_url: %s returned %s and not the key %s of python_deadsnakes_fingerprint; nothing"
            " was written. Find out the reason before you install anything from this archive"
            % (url, "the key " + ", ".join(found) if found else "no key", wanted),
            found=found,
        )
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    handle, new = tempfile.mkstemp(dir=module.tmpdir)
    with os.fdopen(handle, "wb") as stream:
        stream.write(key)
    os.chmod(new, 0o644)
    module.atomic_move(new, path)
    module.exit_json(changed=True, found=found)


if __name__ == "__main__":
    main()
