#!/usr/bin/python
"""Module that removes ssh keys from a TPU node's metadata through the Cloud TPU API; runs on the controller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: node_metadata_keys
short_description: Remove people's ssh keys from a TPU node's metadata
description:
  - Runs on the controller with the Python that runs Ansible, and uses the Cloud TPU API with the settings and
    credentials of the fleet.
  - The API accepts metadata only as a whole, and the last write wins. The module reads them right before it writes and
    again afterwards, and repeats a change that another program has undone. Commands of tpu_ops on this machine wait.
options:
  fleet_file:
    description: The fleet's inventory/tpu_vm.yml.
    type: path
    required: true
  node:
    description: Resource name of the node, projects/P/locations/Z/nodes/N.
    type: str
    required: true
  people:
    description: >-
      Login name -> the keys of that person that stay, as type and base64. Lines of all other people stay as well.
    type: dict
    required: true
  timeout:
    description: Seconds to wait for the API to finish.
    type: int
    default: 300
author: [tpu_ops]
"""

EXAMPLES = r"""
- name: Remove all keys of ada from the metadata
  node_metadata_keys:
    fleet_file: inventory/tpu_vm.yml
    node: projects/p/locations/us-central2-b/nodes/pod
    people: {ada: []}
  delegate_to: localhost
"""

RETURN = r"""
removed:
  description: The lines of the metadata's ssh-keys that were or would be removed.
  type: list
  returned: always
"""

#: The metadata entry from which the guest agent takes keys, in lines of C(USER:TYPE BASE64 COMMENT)
#: (https://cloud.google.com/compute/docs/connect/add-ssh-keys).
ENTRY = "ssh-keys"


def parted(text: str, people: dict[str, list[str]]) -> tuple[list[str], list[str]]:
    """Given the metadata's ssh-keys, and person -> keys to keep, return the lines to keep and the lines to remove."""
    stay: list[str] = []
    go: list[str] = []
    for line in text.splitlines():
        name, _, key = line.strip().partition(":")
        (go if name in people and " ".join(key.split()[:2]) not in people[name] else stay).append(line)
    return stay, go


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "fleet_file": {"type": "path", "required": True},
            "node": {"type": "str", "required": True},
            "people": {"type": "dict", "required": True},
            "timeout": {"type": "int", "default": 300},
        },
        supports_check_mode=True,
    )
    try:
        from tpu_ops import config
        from tpu_ops.cloud import nodes
        from tpu_ops.errors import OpsError
        from tpu_ops.fleet import changing, origin
    except ImportError as exc:
        module.fail_json(msg=f"{exc}; run ansible-playbook from the environment that tpu_ops is installed in")
    node, people, timeout = module.params["node"], module.params["people"], module.params["timeout"]

    def remove(message: Any) -> None:
        stay, go = parted(message.metadata.get(ENTRY, ""), people)
        if go:
            message.metadata[ENTRY] = "\n".join(stay)

    try:
        settings = config.load_file(Path(module.params["fleet_file"]))
        with origin.api(settings) as tpu:
            _, go = parted(nodes.node_metadata(tpu, node).get(ENTRY, ""), people)
            if go and not module.check_mode:
                edits = [changing.Edit(changing.METADATA, remove)]
                changing.change(tpu, settings, node, edits, timeout=timeout, progress=lambda *_: None)
    except OpsError as exc:
        module.fail_json(msg=f"users_remove_metadata_keys: {exc}")
    before = "".join(f"{line}\n" for line in go)
    diff = {"before_header": f"{ENTRY} of {node}", "after_header": f"{ENTRY} of {node}", "before": before, "after": ""}
    module.exit_json(changed=bool(go), removed=go, diff=diff if go else {})


if __name__ == "__main__":
    main()
