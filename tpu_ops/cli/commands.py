"""The table of commands."""

from __future__ import annotations

#: Title -> command -> (module of tpu_ops.cli, one line of help). `--help` reads only this table.
GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "the fleet": {
        "init": ("init", "write a fleet directory: your project, zones, key, and what to install"),
        "list": ("list", "list the workers of the fleet"),
        "who": ("who", "show who holds which TPU"),
        "top": ("top", "watch what the chips do: one screen of the fleet"),
        "doctor": ("doctor", "check the workers and show what is wrong"),
        "refresh": ("refresh", "ask the API, show what changed, rewrite ssh config and known_hosts"),
        "snapshot": (
            "snapshot",
            "publish the fleet for people without credentials, or show how old the local snapshot is",
        ),
        "inventory": ("inventory", "print the workers that are ready, in a form for clush, pdsh and scripts"),
    },
    "nodes": {
        "grant": ("grant", "show what the grant allows and how much of it is used"),
        "create": ("create", "create TPU nodes and wait until they are ready"),
        "apply": ("apply", "make the nodes of the fleet what nodes.yml declares"),
        "delete": ("delete", "delete TPU nodes and queued resources"),
        "node": ("node", "stop, start or restart nodes, or show all facts of a node"),
        "disk": ("disk", "create, list, attach, detach and delete data disks"),
        "bucket": ("bucket", "create a bucket in the fleet's region, or check where one is"),
    },
    "workers": {
        "configure": ("configure", "run site.yml, or another playbook, on workers"),
        "lock": ("lock", "resolve the packages of environments once for all workers"),
        "drift": ("drift", "show which workers differ from what site.yml would make of them"),
        "invite": ("invite", "check a person's entry, create the account, print the message to send"),
        "ssh": ("ssh", "log in to a worker"),
        "tunnel": ("tunnel", "reach a port of a worker on this machine"),
        "jupyter": ("jupyter", "run a notebook server on a worker, and reach it on this machine"),
        "tensorboard": ("tensorboard", "run TensorBoard on a worker, and reach it on this machine"),
        "ssh-config": ("ssh_config", "let ssh, scp, rsync and editors find the workers by name"),
        "keys": ("keys", "add your ssh key to the metadata of a node or of a project"),
        "firewall": ("firewall", "let ssh or mosh reach the workers from given addresses"),
        "run": ("run", "run a command on all workers of a target at once"),
        "sync": ("sync", "copy a directory to all workers of a target"),
    },
    "training runs": {
        "train": ("train", "start a training run on all workers of one or more nodes"),
        "attach": ("attach", "follow a training run in progress"),
        "stop": ("stop", "stop a training run"),
        "status": ("status", "show the state of a training run, rank by rank"),
        "logs": ("logs", "show the output of a training run, or download its logs"),
        "stacks": ("stacks", "show where the processes of a training run are, for one that stands still"),
        "runs": ("runs", "list the training runs"),
        "report": ("report", "report on a run or on the fleet, as text or as a page to send to others"),
        "profile": ("profile", "record profiles of all ranks of a run at the same time"),
        "fetch": ("fetch", "copy files of a run, or of workers, to this machine"),
        "unlock": ("unlock", "free chips that your own runs or processes hold"),
    },
    "without a cloud": {
        "lab": ("lab", "the local lab: a Cloud TPU API whose workers are containers"),
        "completion": ("completion", "print what completes command lines in bash, zsh or fish"),
    },
}
#: Command -> its entry in the table.
COMMANDS: dict[str, tuple[str, str]] = {name: entry for group in GROUPS.values() for name, entry in group.items()}
#: Commands that do not use a fleet.
WITHOUT_FLEET = ("init", "lab", "completion")
