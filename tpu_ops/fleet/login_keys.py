"""Add a user's ssh key to the `ssh-keys` metadata of a node or of a whole project, without touching other entries."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from typing import Any

from tpu_ops.cloud.client import FIRST_DELAY, ApiError, Tpu
from tpu_ops.cloud.compute import Compute
from tpu_ops.cloud.node import Json
from tpu_ops.cloud.operations import Progress
from tpu_ops.config import Settings
from tpu_ops.errors import CloudError
from tpu_ops.fleet import changing
from tpu_ops.fleet.changing import METADATA, Edit

#: Key of the metadata whose value has one line ``USER:TYPE BASE64 COMMENT`` for each ssh key
#: (https://cloud.google.com/compute/docs/connect/add-ssh-keys).
ENTRY = "ssh-keys"
#: Beginning of the comment of a key that expires: JSON with the time follows.
_EXPIRING = "google-ssh "
#: Keys of the metadata that make a worker ignore keys in the metadata: those of the project, or all.
BLOCKED, OS_LOGIN = "block-project-ssh-keys", "enable-oslogin"
#: Values of the metadata that mean yes, in lower case.
_YES = ("true", "y", "yes", "1")
#: How often a change of a project is tried while other programs change the same metadata.
_ATTEMPTS = 6


def merged(text: str, line: str) -> str:
    """Return the value of `ssh-keys` with one more line, unless a line has the same user and key already.

    All other text stays as it is, byte by byte. A line whose key expires does not count, since it is removed one day.

    Args:
        text: The value; empty if there is none.
        line: The new line, ``USER:TYPE BASE64 COMMENT``.
    """
    if any(_lasting(old) == _lasting(line) for old in text.split("\n")):
        return text
    return f"{text}{'' if not text or text.endswith(chr(10)) else chr(10)}{line}"


def _lasting(line: str) -> tuple[str, ...]:
    """Return the user, the type and the base64 text of a line; empty if the key expires or the line has no key."""
    user, _, key = line.strip().partition(":")
    words = key.split(None, 2)
    if len(words) < 2 or (len(words) == 3 and words[2].startswith(_EXPIRING)):
        return ()
    return user, words[0], words[1]


def says_yes(metadata: Mapping[str, str], key: str) -> bool:
    """Return whether an entry of the metadata is set to yes."""
    return metadata.get(key, "").strip().lower() in _YES


def items_of(project: Json) -> dict[str, str]:
    """Return the metadata in Compute Engine's answer for a project; its values may be secret."""
    items = project.get("commonInstanceMetadata", {}).get("items", [])
    return {item["key"]: item.get("value", "") for item in items}


def push_to_node(tpu: Tpu, settings: Settings, name: str, line: str, *, timeout: float, progress: Progress) -> bool:
    """Add a line to a node's `ssh-keys`; return whether it was added, and not there already.

    Raises:
        ApiError: The API refused.
        Late: The operation was not done in time.
        CloudError: Other programs kept overwriting the change.
    """

    def add(node: Any) -> None:
        node.metadata[ENTRY] = merged(node.metadata.get(ENTRY, ""), line)

    edits = [Edit(METADATA, add)]
    return changing.change(tpu, settings, name, edits, timeout=timeout, progress=progress)


def push_to_project(compute: Compute, project: str, line: str, *, timeout: float, progress: Progress) -> bool:
    """Add a line to a project's `ssh-keys`; return whether it was added, and not there already.

    The API refuses the change if the metadata has changed since it was read, by a fingerprint.

    Raises:
        ApiError: The API refused.
        Late: The operation was not done in time.
        CloudError: Other programs kept changing the metadata.
    """
    where, path = f"project {project}", f"projects/{project}"
    for attempt in range(_ATTEMPTS):
        metadata = compute.call("GET", path, where).get("commonInstanceMetadata", {})
        items = metadata.get("items", [])
        old = next((item.get("value", "") for item in items if item["key"] == ENTRY), "")
        if (new := merged(old, line)) == old:
            return attempt > 0
        body = {"kind": "compute#metadata", "items": _with_entry(items, new)}
        if "fingerprint" in metadata:
            body["fingerprint"] = metadata["fingerprint"]
        try:
            operation = compute.call("POST", f"{path}/setCommonInstanceMetadata", where, body=body)
            compute.wait(operation, f"{path}/global", where, timeout=timeout, progress=progress)
        except ApiError as exc:
            if exc.status != "FAILED_PRECONDITION":
                raise
            # Random delays keep two programs from trying again at the same moment.
            time.sleep(FIRST_DELAY * 2**attempt * random.uniform(0.5, 1.5))  # noqa: S311 - no secret
        else:
            return True
    raise CloudError(
        f"other programs changed the metadata {_ATTEMPTS} times at the same moment; the key is not there",
        where=where,
        fix="run the same command again when they have ended",
    )


def _with_entry(items: list[Json], value: str) -> list[Json]:
    """Return the items of a project's metadata, in their order, with this value of `ssh-keys`."""
    entry = {"key": ENTRY, "value": value}
    if all(item["key"] != ENTRY for item in items):
        return [*items, entry]
    return [entry if item["key"] == ENTRY else item for item in items]
