"""Program for a worker's own Python: runs site.yml on a new worker when it boots, without a controller.

`boot_bundles` makes it the startup script of a node, which Google's guest agent starts as root at each boot. It
supports Python 3.8 and uses only the standard library. It fetches the node's bundle from a bucket, checks it by its
digest, and passes it to `receiver`, as a controller would. Its output is in the journal. At later boots it does
nothing: a controller may have changed the fleet since.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from typing import Any, Callable, Dict, List

#: Directory of the state and of the lock that is held meanwhile.
STATE = "/var/lib/tpu_ops/boot"
#: Name of the file with the state, in JSON.
FILE = "state.json"
#: Cloud Storage.
STORAGE = "https://storage.googleapis.com"
METADATA = "http://{}/computeMetadata/v1/instance/"
#: Seconds for a request, for the retries of one object, and before the first retry.
TIMEOUT, PATIENCE, PAUSE = 60.0, 120.0, 2.0
#: Installs a newer Python where the image's is too old for Ansible. Ubuntu 22.04 has this package beside Python 3.10.
NEWER_PYTHON = (
    "apt-get update -q; DEBIAN_FRONTEND=noninteractive apt-get install -q -y -o DPkg::Lock::Timeout=300 python3.11"
)


class Failed(Exception):
    """The worker could not be configured; the text says why."""


def configure(bundle: str, digest: str, origin: str, state: str = STATE) -> int:
    """Run site.yml on this worker unless that was done before; return the exit code.

    Args:
        bundle: Bucket and object of the node's bundle, as in ``my-bucket/tpu_ops/pod-0123456789abcdef.json``. The
            archives are beside it.
        digest: The SHA-256 digest of the bundle.
        origin: URL of an emulator of Cloud Storage, which needs no credentials; empty means the real service.
        state: Directory of the state.
    """
    os.makedirs(state, mode=0o755, exist_ok=True)
    file = os.path.join(state, FILE)
    with open(os.path.join(state, "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if read(file).get("state") in ("done", "failed"):
            say("site.yml has run at an earlier boot")
            return 0
        write(file, {"state": "running", "failures": []})
        try:
            failures = run(bundle, digest, origin)
        except (Failed, OSError, ValueError, LookupError) as failure:
            failures = [str(failure) or type(failure).__name__]
        write(file, {"state": "failed" if failures else "done", "failures": failures})
    for text in failures:
        say("failed: " + text)
    say("correct this, and run `tpu_ops configure` for this worker" if failures else "site.yml has run")
    return 1 if failures else 0


def run(bundle: str, digest: str, origin: str) -> List[str]:
    """Fetch the bundle, run the playbook, and return what failed."""
    content = json.loads(fetched(bundle, digest, origin))
    index = int(metadata("attributes/agent-worker-number"))
    order = content["orders"][index]
    say("running {} as worker {}".format(order["playbook"], index))
    names = [name[: content["digits"]] for name in content["archives"]]
    argv = [sys.executable, "-I", "-c", content["receiver"], content["kept"], content["python"], *names]
    for attempt in range(2):
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin and process.stdout  # noqa: S101, PT018 - for the type checker
            answer = json.loads(process.stdout.readline() or b"{}")
            if answer.get("python"):
                folder = bundle.rpartition("/")[0]
                whole = dict(zip(names, content["archives"]))
                missing = [
                    fetched("{}/{}.tar.gz".format(folder, name), whole[name], origin) for name in answer["missing"]
                ]
                sizes = " ".join(str(len(data)) for data in missing).encode()
                # The input stays open: its end would mean that nobody waits for the playbook.
                for data in (sizes, b"\n", *missing, json.dumps(order).encode(), b"\n"):
                    process.stdin.write(data)
                process.stdin.flush()
                return followed(process.stdout)
            process.stdin.close()
        if not attempt and answer:
            say("Python {} is too old for Ansible: installing a newer one".format(answer["found"]))
            subprocess.run(["sh", "-c", NEWER_PYTHON], check=False)
    found = "the newest Python is " + answer["found"] if answer else "the receiver did not start"
    raise Failed("{}, and Ansible needs {}".format(found, content["python"]))


def followed(lines: Any) -> List[str]:
    """Print the steps of the playbook that changed something or failed; return what failed."""
    for line in lines:
        ((kind, content),) = json.loads(line).items()
        if kind == "outcome":
            if not content["code"]:
                return []
            return ["{}: {}".format(step["task"], step["message"]) for step in content["failures"]] or [
                "ansible-playbook ended with code {}".format(content["code"])
            ]
        if kind == "step" and content["outcome"] not in ("ok", "skipped"):
            say("{}: {}".format(content["outcome"], content["task"]))
    return ["the playbook was ended"]


def fetched(name: str, digest: str, origin: str) -> bytes:
    """Return an object of a bucket after checking its digest.

    Args:
        name: Bucket and object.
        digest: Its SHA-256 digest.
        origin: URL of an emulator; empty means the real service.

    Raises:
        Failed: It cannot be fetched, or is another one.
    """

    def once() -> bytes:
        headers = {}
        if not origin:
            token = json.loads(metadata("service-accounts/default/token"))["access_token"]
            headers["Authorization"] = "Bearer " + token
        bucket, _, key = name.partition("/")
        place = "/storage/v1/b/{}/o/{}?alt=media".format(bucket, urllib.parse.quote(key, safe=""))
        return answered((origin or STORAGE) + place, headers)

    data = patiently(once, "gs://" + name)
    if hashlib.sha256(data).hexdigest() != digest:
        raise Failed("gs://{} is not the object that was published for this node".format(name))
    return data


def metadata(path: str) -> bytes:
    """Return a value of this instance from the metadata server."""
    url = METADATA.format(os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")) + path
    return patiently(lambda: answered(url, {"Metadata-Flavor": "Google"}), url)


def patiently(ask: Callable[[], bytes], what: str) -> bytes:
    """Return an answer; ask again for a while, since network and rights may come later than the boot.

    Raises:
        Failed: No answer came in time.
    """
    end, pause = time.monotonic() + PATIENCE, PAUSE
    while True:
        try:
            return ask()
        except (OSError, ValueError, KeyError) as failure:
            if time.monotonic() + pause > end:
                raise Failed("{}: {}".format(what, failure)) from failure
            time.sleep(pause)
            pause = min(2 * pause, 30.0)


def answered(url: str, headers: Dict[str, str]) -> bytes:
    """Return the body of the answer to a GET request."""
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT) as answer:  # noqa: S310
        return bytes(answer.read())


def read(file: str) -> Dict[str, Any]:
    """Return the state that an earlier boot has written; empty if there is none."""
    with contextlib.suppress(OSError, ValueError), open(file) as opened:
        found = json.load(opened)
        return found if isinstance(found, dict) else {}
    return {}


def write(file: str, content: Dict[str, Any]) -> None:
    """Replace the state."""
    with open(file + ".new", "w") as opened:
        json.dump(content, opened)
    os.replace(file + ".new", file)


def say(text: str) -> None:
    """Print one line."""
    print("tpu_ops: " + text, flush=True)
