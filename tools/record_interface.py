"""Record the interfaces that users, scripts and playbooks rely on, to compare two versions with `diff -ru`.

    python -m tools.record_interface DIRECTORY

It writes one file for the help of each command, for each role's variables, for the options of the inventory plugin, and
for the JSON of each reading command on a fixed fleet in the lab. Only the form of JSON is kept: keys and types, since
addresses, times and ids differ each time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from tools.bench.lab import Lab
from tools.bench.measure import BIN, ROOT, ZONE
from tpu_ops.cli.commands import COMMANDS

_LAB_COMMANDS = ("up", "down", "env", "status", "maintenance", "preempt", "capacity", "api")
_BUCKET_COMMANDS = ("create", "check")
_DISK_COMMANDS = ("create", "list", "attach", "detach", "delete")
_NODE, _RUN = "pod", "kept"
#: Maps with one key for each host, package or label; only the form of their values is recorded.
_BY_NAME = frozenset({"hostvars", "workers", "packages", "labels", "space", "environment_files"})
#: argparse wraps lines at the terminal's width.
_WIDE = {**os.environ, "COLUMNS": "100"}
#: File name -> command that reads something and prints it as JSON.
_READING = {
    "list": ("tpu_ops", "list", "--json"),
    "list-queued": ("tpu_ops", "list", "--queued", "--json"),
    "list-cost": ("tpu_ops", "list", "--cost", "--json"),
    "list-idle": ("tpu_ops", "list", "--idle", "12h", "--json"),
    "refresh": ("tpu_ops", "refresh", "--json"),
    "refresh-dry": ("tpu_ops", "refresh", "--dry-run", "--json"),
    "snapshot": ("tpu_ops", "snapshot", "--json"),
    "runs": ("tpu_ops", "runs", "--json"),
    "status": ("tpu_ops", "status", _RUN, "--json"),
    "who": ("tpu_ops", "who", "--json"),
    "doctor": ("tpu_ops", "doctor", _NODE, "--json"),
    "run": ("tpu_ops", "run", _NODE, "--json", "--", "true"),
    "sync-dry": ("tpu_ops", "sync", _NODE, "examples/digits", "--dry-run", "--json"),
    "delete-dry": ("tpu_ops", "delete", _NODE, "--dry-run", "--json"),
    "node-describe": ("tpu_ops", "node", "describe", _NODE, "--json"),
    "create-dry": ("tpu_ops", "create", "other", "--type", "v4-8", "--zone", ZONE, "--dry-run", "--json"),
    "error": ("tpu_ops", "status", "no-such-run", "--json"),
    "inventory": ("ansible-inventory", "--list"),
    "record-on-worker": (
        "tpu_ops",
        "run",
        f"{_NODE}-w0",
        "--",
        "sudo",
        "cat",
        f"/var/lib/tpu_ops/runs/{_RUN}/record.json",
    ),
}


def form(value: Any) -> Any:
    """Return the form of a JSON value: its keys, and the names of its types.

    A list becomes the distinct forms of its elements; a map by name becomes the distinct forms of its values.
    """
    if isinstance(value, Mapping):
        return {
            str(key): _each(inner.values()) if key in _BY_NAME and isinstance(inner, Mapping) else form(inner)
            for key, inner in sorted(value.items())
        }
    if isinstance(value, list):
        return _each(value)
    return type(value).__name__


def _each(values: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if (one := form(value)) not in found:
            found.append(one)
    return sorted(found, key=json.dumps)


def _written(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value, indent=2, sort_keys=True) + "\n")


def _help(place: Path) -> None:
    names = [(name,) for name in COMMANDS] + [("lab", name) for name in _LAB_COMMANDS]
    names += [("bucket", name) for name in _BUCKET_COMMANDS]
    names += [("disk", name) for name in _DISK_COMMANDS]
    for words in [(), *names]:
        command = [str(BIN / "tpu_ops"), *words, "--help"]
        done = subprocess.run(command, env=_WIDE, capture_output=True, text=True, check=True)
        _written(place / "help" / f"{'-'.join(words) or 'tpu_ops'}.txt", done.stdout + done.stderr)


def _ansible(place: Path) -> None:
    for path in sorted(ROOT.glob("roles/*/meta/argument_specs.yml")):
        _written(place / "roles" / f"{path.parent.parent.name}.json", yaml.safe_load(path.read_text()))
    command = [str(BIN / "ansible-doc"), "-t", "inventory", "--json", "tpu_vm"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    documented = json.loads(done.stdout)["tpu_vm"]
    documented["doc"].pop("filename", None)
    _written(place / "inventory-plugin.json", documented)


def _fleet(place: Path, root: Path) -> None:
    lab = Lab(root)
    with lab.up():
        lab.do("tpu_ops", "create", _NODE, "--type", "v4-16", "--zone", ZONE)
        lab.do("ansible-playbook", "tools/bench/launcher.yml")
        train = ("tpu_ops", "train", _NODE, "--name", _RUN, "--sync", "examples/digits", "--json", "--", "true")
        _written(place / "json" / "train.json", form(json.loads(lab.do(*train))))
        lab.do("tpu_ops", "train", _NODE, "--name", "active", "--detach", "--", "sleep", "600")
        for name, command in _READING.items():
            # `status no-such-run` fails on purpose; the output of others shows whether they succeeded.
            done = subprocess.run(command, cwd=ROOT, env=lab.environ, capture_output=True, text=True, check=False)
            try:
                found = form(json.loads(done.stdout))
            except ValueError:
                found = {"no JSON": (done.stdout + done.stderr)[-2000:]}
            _written(place / "json" / f"{name}.json", found)
        stopped = lab.do("tpu_ops", "stop", "active", "--json")
        _written(place / "json" / "stop.json", form(json.loads(stopped)))


def main() -> int:
    """Record the interfaces into a new directory."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("directory", type=Path, help="a new directory for the files")
    place: Path = parser.parse_args().directory
    place.mkdir(parents=True)
    _help(place)
    _ansible(place)
    with tempfile.TemporaryDirectory() as root:
        _fleet(place, Path(root))
    return 0


if __name__ == "__main__":
    sys.exit(main())
