"""The doctor's checks of buckets: their locations, and the access of the nodes' service accounts."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import Collection, Mapping, Sequence

from tpu_ops.cloud import bucket_places
from tpu_ops.cloud.auth import Auth
from tpu_ops.cloud.bucket_places import BucketPlace, Level, verdict
from tpu_ops.cloud.node import SERVING_STATES, Worker
from tpu_ops.errors import CloudError
from tpu_ops.runs import bucket_check, bucket_probe
from tpu_ops.runs.doctor import Finding
from tpu_ops.runs.preflight import Fault
from tpu_ops.ssh.fanout import Fanout
from tpu_ops.ssh.renewal import in_thread
from tpu_ops.ssh.replies import Result

#: Key -> the statement that is true of a worker that passes.
CHECKS = {
    "bucket_place": "reading the buckets costs nothing",
    "bucket_access": "the nodes' service accounts can use the buckets",
}
#: Seconds for a worker, with all requests to all buckets.
LIMIT = 90.0
_ROLE = "roles/storage.objectUser"

_log = logging.getLogger(__name__)


async def examine(
    fanout: Fanout,
    workers: Sequence[Worker],
    found: Sequence[Finding],
    names: Sequence[str],
    auth: Auth,
    *,
    write: bool,
) -> list[Finding]:
    """Return the findings on buckets.

    Args:
        fanout: Reaches the workers.
        workers: The workers.
        found: The findings on the workers, which name those that do not answer.
        names: The buckets, each once.
        auth: This machine's credentials, for the locations.
        write: Whether to write a small object and delete it.
    """
    silent = {fault.worker for finding in found if finding.check == "answers" for fault in finding.faults}
    located, tried = await asyncio.gather(
        in_thread(lambda: bucket_places.find_each(names, auth, bucket_check.LIMIT)),
        access(fanout, one_of_each(workers, silent), names, write=write),
    )
    return [places(one_of_each(workers), located), tried]


def one_of_each(workers: Sequence[Worker], silent: Collection[str] = ()) -> list[Worker]:
    """Return one worker of each READY node: all workers of a node have the same service account and region.

    Args:
        workers: The workers to choose from.
        silent: Workers that do not answer, which are left out.
    """
    chosen: dict[str, Worker] = {}
    for worker in workers:
        if worker.node.state in SERVING_STATES and worker.host not in silent:
            chosen.setdefault(worker.node.full_name, worker)
    return list(chosen.values())


def places(workers: Sequence[Worker], found: Mapping[str, BucketPlace | CloudError]) -> Finding:
    """Compare the locations of buckets with the regions of workers; log what is a warning only.

    Args:
        workers: One worker of each node.
        found: Bucket -> its place, or why the place is unknown.
    """
    faults, warnings, known = [], dict[str, None](), False
    for name, place in found.items():
        if isinstance(place, CloudError):
            warnings[str(place)] = None
            continue
        known = True
        for worker in workers:
            region = worker.node.region
            judged = verdict(place, region)
            text = bucket_check.in_words(name, judged)
            if judged.level is Level.REFUSED:
                fix = f"use a bucket of the region: `tpu_ops bucket create NAME --region {region}`"
                faults.append(Fault(worker.host, text, fix, check="bucket_place"))
            elif judged.level is Level.WARNING:
                warnings[text] = None
    for text in warnings:
        _log.warning("%s", text)
    return Finding("bucket_place", tuple(faults), tuple(worker.host for worker in workers) if known else ())


async def access(fanout: Fanout, workers: Sequence[Worker], names: Sequence[str], *, write: bool) -> Finding:
    """Try on workers whether their service accounts can read buckets, and write to them.

    Args:
        fanout: Reaches the workers.
        workers: One worker of each node.
        names: The buckets.
        write: Whether to write a small object and delete it.
    """
    hosts = [worker.host for worker in workers]
    results = await fanout.run(hosts, command(names, write=write), limit=LIMIT)
    faults = [fault for host in hosts for fault in faults_of(results[host])]
    return Finding("bucket_access", tuple(faults), tuple(hosts))


def command(names: Sequence[str], *, write: bool) -> list[str]:
    """Return the command that tries the access on a worker."""
    asked = json.dumps({"buckets": list(names), "write": write})
    return ["/usr/bin/python3", "-IS", "-c", inspect.getsource(bucket_probe), asked]


def faults_of(result: Result) -> list[Fault]:
    """Return the faults of one worker, given the result of `command` there."""

    def fault(problem: str, fix: str) -> Fault:
        return Fault(result.host, problem, fix, unreachable=not result.reached, check="bucket_access")

    try:
        told = json.loads(result.stdout)
        problem, account = str(told["problem"]), str(told["account"])
        failures = [(verb, str(name), str(why)) for verb in ("read", "write") for name, why in told[verb].items()]
    except (ValueError, KeyError, TypeError, AttributeError):
        last = result.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        why = result.problem or last or f"exit code {result.code}"
        return [fault(f"the access to the buckets could not be tried: {why}", f"tpu_ops run {result.host} -- true")]
    if problem:
        made = "`tpu_ops create --service-account`"
        return [fault(problem, f"the node needs a service account: create it again with one ({made})")]
    return [
        fault(f"{account or 'the worker'} cannot {verb} gs://{name}: {why}", _fix(name, account, why))
        for verb, name, why in failures
    ]


def _fix(name: str, account: str, why: str) -> str:
    if "HTTP 404" in why:
        return f"check the name of gs://{name}"
    if "scope" in why:
        return "create the node again without --scope, or with the scope cloud-platform"
    if "HTTP 40" not in why or not account:
        return "check the network of the worker"
    member = f"--member=serviceAccount:{account} --role={_ROLE}"
    return f"gcloud storage buckets add-iam-policy-binding gs://{name} {member}"
