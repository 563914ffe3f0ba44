"""Which commands there are, and how texts name them so that they can be copied."""

from __future__ import annotations

import re
from collections.abc import Callable

from tpu_ops.errors import OpsError

#: Command -> (module of tpu_ops.cli, one line of help). `--help` reads only this table.
COMMANDS: dict[str, tuple[str, str]] = {
    "list": ("list", "list the workers of the fleet"),
    "refresh": ("refresh", "ask the API, show what changed, rewrite ssh config and known_hosts"),
    "snapshot": ("snapshot", "publish the fleet for people without credentials, or show how old the local snapshot is"),
    "inventory": ("inventory", "print the workers that are ready, in a form for clush, pdsh and scripts"),
    "create": ("create", "create a TPU node and wait until it is ready"),
    "delete": ("delete", "delete a TPU node"),
    "configure": ("configure", "run site.yml, or another playbook, on workers"),
    "ssh": ("ssh", "log in to a worker"),
    "ssh-config": ("ssh_config", "let ssh, scp, rsync and editors find the workers by name"),
    "run": ("run", "run a command on all workers of a target at once"),
    "sync": ("sync", "copy a directory to all workers of a target"),
    "train": ("train", "start a training run on all workers of one or more nodes"),
    "attach": ("attach", "follow a training run in progress"),
    "stop": ("stop", "stop a training run"),
    "status": ("status", "show the state of a training run, rank by rank"),
    "logs": ("logs", "show the output of a training run, or download its logs"),
    "runs": ("runs", "list the training runs"),
    "who": ("who", "show who holds which TPU"),
    "unlock": ("unlock", "free chips that your own runs or processes hold"),
    "doctor": ("doctor", "check the workers and show what is wrong"),
    "lab": ("lab", "the local lab: a Cloud TPU API whose workers are containers"),
}

#: One of them in a text, without a fleet; in double quotes stand other things. `tpu_ops lab` takes none. Not
#: compiled here: most commands never search for it.
_NAMED = rf"(?<!\")\btpu_ops ({'|'.join(name for name in COMMANDS if name != 'lab')})(?![\w-]| --fleet )"


def on_fleet(text: str, command: Callable[[str], str]) -> str:
    """Return a text whose commands are on a fleet: workers and the packages below this one do not know its name.

    Args:
        text: What is said.
        command: `Settings.command` of the fleet.
    """
    return re.sub(_NAMED, lambda found: command(found[1]), text) if text else ""


def name_fleet(failure: OpsError, command: Callable[[str], str]) -> None:
    """Have an error name the fleet in the commands that it suggests.

    Args:
        failure: The error.
        command: As of `on_fleet`.
    """
    failure.what, failure.fix = on_fleet(failure.what, command), on_fleet(failure.fix, command)
