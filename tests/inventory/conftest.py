"""Ansible reads its configuration when it is imported: the project's own."""

import os
from pathlib import Path

os.environ["ANSIBLE_CONFIG"] = str(Path(__file__).resolve().parents[2] / "ansible.cfg")
