#!/usr/bin/python
"""Module that keeps a set of certificate authorities in the system's store; runs on Python 3.8."""

from __future__ import annotations

import hashlib
import os
import re
import ssl

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.mount_points import read
from ansible.module_utils.text_files import put
from ansible.module_utils.turns import take_turn

DOCUMENTATION = r"""
module: ca_certificates
short_description: Keep a set of certificate authorities in the store of a Debian or Ubuntu system
description:
  - Makes O(directory) contain exactly the given certificates, one file each, and runs C(update-ca-certificates)
    whenever the system's bundle does not match them, also if an earlier run died between the two.
options:
  certificates:
    description: PEM texts; each may hold several certificates.
    type: list
    elements: str
    required: true
  directory:
    description: Directory of the files, below /usr/local/share/ca-certificates. Nothing else may use it.
    type: path
    default: /usr/local/share/ca-certificates/tpu_ops
  bundle:
    description: The bundle that update-ca-certificates writes.
    type: path
    default: /etc/ssl/certs/ca-certificates.crt
author: [tpu_ops]
"""

EXAMPLES = r"""
- name: Trust the proxy's certificate authority
  ca_certificates:
    certificates: ["{{ lookup('ansible.builtin.file', '/etc/ssl/proxy.pem') }}"]
"""

RETURN = r"""
added:
  description: Files that were or would be written.
  type: list
  returned: always
removed:
  description: Files that were or would be removed.
  type: list
  returned: always
"""

PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)

#: Suffix of a certificate's file that is about to be deleted.
LEAVING = ".leaving"


def split_pem(text: str) -> dict[str, str]:
    """Given PEM text, return the certificates in it: SHA-256 -> PEM in canonical form.

    Raises:
        ValueError: The text holds no certificate, or one that is not base64.
    """
    found = {}
    for block in PEM.findall(text):
        der = ssl.PEM_cert_to_DER_cert(block)
        found[hashlib.sha256(der).hexdigest()] = ssl.DER_cert_to_PEM_cert(der)
    if not found:
        raise ValueError("it contains no certificate")
    return found


def bundled(path: str) -> set[str]:
    """Return the digests of all certificates in a PEM file; empty if the file is missing or invalid."""
    try:
        return set(split_pem(read(path)))
    except ValueError:
        return set()


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "certificates": {"type": "list", "elements": "str", "required": True},
            "directory": {"type": "path", "default": "/usr/local/share/ca-certificates/tpu_ops"},
            "bundle": {"type": "path", "default": "/etc/ssl/certs/ca-certificates.crt"},
        },
        supports_check_mode=True,
    )
    take_turn(module, "certificate authorities")
    directory = module.params["directory"]
    present = sorted(os.listdir(directory)) if os.path.isdir(directory) else []
    known = bundled(module.params["bundle"])
    # A certificate that the system trusts without this module needs no file in the module's directory.
    others = known - {digest for name in present for digest in bundled(os.path.join(directory, name))}
    wanted: dict[str, str] = {}
    for position, text in enumerate(module.params["certificates"]):
        try:
            wanted.update(split_pem(text))
        except ValueError as exc:
            module.fail_json(msg="base_ca_certificates[%d]: %s; name a PEM file" % (position, exc))
    files = {"%s.crt" % digest[:16]: text for digest, text in wanted.items() if digest not in others}
    added = [name for name in sorted(files) if read(os.path.join(directory, name)) != files[name]]
    removed = [name for name in present if name not in files]
    stale = not set(wanted) <= known
    changed = bool(added or removed or stale)
    if changed and not module.check_mode:
        tool = module.get_bin_path("update-ca-certificates", opt_dirs=["/usr/sbin"])
        os.makedirs(directory, mode=0o755, exist_ok=True)
        # update-ca-certificates reads *.crt only. The renamed file is deleted last: if this run is interrupted before
        # that, the renamed file tells the next run that the bundle still contains the certificate.
        leaving = {name: name if name.endswith(LEAVING) else name + LEAVING for name in removed}
        for name, other in leaving.items():
            os.replace(os.path.join(directory, name), os.path.join(directory, other))
        for name in added:
            put(os.path.join(directory, name), files[name], 0o644)
        if tool is None:
            # When ca-certificates is installed, its installation reads the directory.
            module.warn(
                "update-ca-certificates is missing; the certificates take effect once ca-certificates is installed"
            )
        else:
            # --fresh also removes the links to removed certificates.
            module.run_command([tool, "--fresh"], check_rc=True)
        for name in leaving.values():
            os.unlink(os.path.join(directory, name))
    module.exit_json(
        changed=changed,
        added=added,
        removed=removed,
        diff={
            "before": "".join(name + "\n" for name in present),
            "after": "".join(name + "\n" for name in sorted(files)),
        },
    )


if __name__ == "__main__":
    main()
