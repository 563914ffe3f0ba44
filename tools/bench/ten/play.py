"""Run site.yml of this directory with tpu_ops: `play.py controller` or `play.py workers`, which says who runs it.

tpu_ops has no command for this: its commands let workers run only its own playbooks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tpu_ops import config
from tpu_ops.ansible import playbook, playing
from tpu_ops.ansible.playbook import Project


def main() -> int:
    """Run the playbook; print what it did on each worker."""
    settings = config.load()
    project = Project(Path(__file__).resolve().parent, playbook.tool_root() / "ansible.cfg", settings.file)
    on_themselves = {"controller": False, "workers": True}[sys.argv[1]]
    outcome = playing.play(settings, project, project.playbook("site"), on_themselves=on_themselves)
    print(json.dumps({"hosts": outcome.hosts}))
    return outcome.code or 0


if __name__ == "__main__":
    sys.exit(main())
