"""An Ansible callback that writes a run's statistics to a file, for programs that check them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: stats_file
type: aggregate
short_description: Write the statistics of a playbook run to a file
description:
  - Writes one JSON object, host name -> {ok, changed, failures, unreachable, skipped}, to the file that the
    environment variable STATS_FILE names.
requirements:
  - STATS_FILE is set
"""


class CallbackModule(CallbackBase):  # type: ignore[misc] # Ansible ships no types
    """Write statistics at the end of the playbook."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "stats_file"
    CALLBACK_NEEDS_ENABLED = True

    def v2_playbook_on_stats(self, stats: Any) -> None:
        """Write the summary of every host."""
        summary = {host: stats.summarize(host) for host in sorted(stats.processed)}
        Path(os.environ["STATS_FILE"]).write_text(json.dumps(summary))
