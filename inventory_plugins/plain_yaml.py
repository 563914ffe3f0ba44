"""Inventory plugin for YAML inventories written by hand; it ignores the files of the plugin tpu_vm."""

from __future__ import annotations

DOCUMENTATION = r"""
name: plain_yaml
short_description: YAML inventories, except the files of tpu_vm
description:
  - Reads what P(ansible.builtin.yaml#inventory) reads, except files whose name makes them P(tpu_vm#inventory)'s.
  - Ansible tries one inventory plugin after the other and shows the errors of all. With this one instead of
    P(ansible.builtin.yaml#inventory), only the error of P(tpu_vm#inventory) is shown.
author:
  - The tpu_ops authors
options:
  yaml_extensions:
    description: Extensions of file names.
    type: list
    elements: str
    default: [.yaml, .yml, .json]
    env:
      - name: ANSIBLE_YAML_FILENAME_EXT
      - name: ANSIBLE_INVENTORY_PLUGIN_EXTS
    ini:
      - section: defaults
        key: yaml_valid_extensions
      - section: inventory_plugin_yaml
        key: yaml_valid_extensions
"""

EXAMPLES = r"""
# ansible.cfg
# [inventory]
# enable_plugins = tpu_vm, plain_yaml
"""

from ansible.plugins.inventory import yaml


class InventoryModule(yaml.InventoryModule):  # type: ignore[misc] # Ansible ships no types
    """The plugin `ansible.builtin.yaml`, except that it ignores the files of the plugin `tpu_vm`."""

    NAME = "plain_yaml"

    def verify_file(self, path: str) -> bool:
        return not path.endswith(("tpu_vm.yml", "tpu_vm.yaml")) and bool(super().verify_file(path))
