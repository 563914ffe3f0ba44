"""Filters that evaluate the all-reduce test of a slice; no side effects, so that their tests are tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

HostVars = Mapping[str, Mapping[str, Any]]

#: The systemd unit of a training run on a worker.
RUN = "tpu-run.service"


def slices(hosts: Iterable[str], hostvars: HostVars) -> dict[str, dict[int, str]]:
    """Group hosts by node: node -> worker index -> host; hosts that are not part of a node are left out."""
    found: dict[str, dict[int, str]] = {}
    for host in hosts:
        variables = hostvars[host]
        if "tpu_node_label" not in variables:
            continue
        found.setdefault(str(variables["tpu_node_label"]), {})[int(variables["tpu_worker_index"])] = host
    return found


def names(node: str, count: int, indices: Iterable[int], known: Mapping[int, str]) -> str:
    """Return the names of a node's workers with these indices; a worker outside the play is called NODE-wINDEX."""
    return ", ".join(known.get(index, f"{node}-w{index}") for index in indices if index < count)


def unfit_slices(hosts: Iterable[str], hostvars: HostVars, alive: Iterable[str]) -> dict[str, str]:
    """Return the nodes that cannot be verified at present, each with the reason.

    Args:
        hosts: The hosts of the play.
        hostvars: The hosts' variables, which include the facts of the role `facts`.
        alive: The hosts that answered.
    """
    found = {}
    answering = set(alive)
    for node, workers in slices(hosts, hostvars).items():
        count = int(hostvars[next(iter(workers.values()))]["tpu_worker_count"])
        left_out = [index for index in range(count) if index not in workers]
        silent = [index for index, host in workers.items() if host not in answering]
        busy = [
            index for index, host in workers.items() if host in answering and has_run(hostvars[host]["ansible_facts"])
        ]
        if busy:
            found[node] = (
                f"a run is active on {names(node, count, busy, workers)}: wait for it, or end it with `tpu_ops stop`"
            )
        elif left_out:
            outside = names(node, count, left_out, workers)
            found[node] = (
                f"only whole slices are verified, and --limit leaves out {outside}; include the whole node in --limit"
            )
        elif silent:
            found[node] = (
                f"{names(node, count, silent, workers)} does not answer; repair the connection, or leave out the node"
                " with --limit"
            )
    return found


def has_run(facts: Mapping[str, Any]) -> bool:
    """Return whether a run is active on a worker, given its facts."""
    return facts["worker"]["units"].get(RUN, {}).get("active", "inactive") not in {"inactive", "failed"}


def runs_on(hosts: Iterable[str], hostvars: HostVars) -> list[str]:
    """Return the hosts on which a run is active."""
    return [host for host in hosts if has_run(hostvars[host]["ansible_facts"])]


def verified(
    hosts: Iterable[str], hostvars: HostVars, unfit: Mapping[str, str], register: str
) -> dict[str, dict[str, list[str]]]:
    """Return the test's result for each verified node: `faults`, and `lines` to show to the user.

    Args:
        hosts: The hosts of the play.
        hostvars: The hosts' variables.
        unfit: The nodes that were not verified -> the reason.
        register: The registered variable with each worker's result of the module slice_worker.
    """
    found = {}
    for node, workers in slices(hosts, hostvars).items():
        if node in unfit:
            continue
        variables = hostvars[next(iter(workers.values()))]
        answers = {host: hostvars[host].get(register) or {} for _, host in sorted(workers.items())}
        faults = slice_faults(variables, answers)
        reports = [answer["report"] for answer in answers.values() if answer.get("report")]
        found[node] = {"faults": faults, "lines": [] if faults else [line(reports), *alone(variables)]}
    return found


def alone(variables: Mapping[str, Any]) -> list[str]:
    """Return a note if the worker's slice is one of several: the network between slices is not tested."""
    if variables.get("tpu_slice_index") is None:
        return []
    resource = variables["tpu_queued_resource"]
    return [f"the slice is one of several of {resource}, verified alone: the network between them is not tested"]


def slice_faults(variables: Mapping[str, Any], answers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return all faults of a slice, given one worker's variables and the test results of all workers."""
    silent = [host for host, answer in answers.items() if "fault" not in answer]
    faults = [f"{host}: did not answer" for host in silent]
    faults += [f"{host}: {answer['fault']}" for host, answer in answers.items() if answer.get("fault")]
    if faults:
        return faults
    expected = {
        "workers": int(variables["tpu_worker_count"]),
        "platform": str(variables.get("jax_platform", "tpu")),
        "chips": int(variables["tpu_chips"]),
    }
    for host, answer in answers.items():
        report = answer["report"]
        for key, value in expected.items():
            # `tpu_chips` is 0 if the accelerator type is unknown.
            if value and report[key] != value:
                faults.append(f"{host}: {key} {report[key]}, expected {value}")
        if not report["right"]:
            faults.append(f"{host}: the all-reduce over {report['devices']} devices returned a wrong sum")
    return faults


def line(reports: list[dict[str, Any]]) -> str:
    """Return the measurements of a slice in one line, given the reports of all its workers.

    The bus bandwidth is B / t, where t is the time and B = 2 (n - 1) / n times the sum's size is the minimum number of
    bytes that each of n devices must send and receive. So slices of different sizes can be compared.
    """
    first = reports[0]
    seconds = max(median(report["seconds"]) for report in reports)
    rate = 2 * (first["devices"] - 1) / first["devices"] * first["bytes"] / seconds / 1e9
    return (
        f"{first['chips']} chips ({first['kind']}), {first['devices']} devices on {first['workers']} workers, "
        f"JAX {first['jax']}: all-reduce of {first['bytes'] / 2**20:.3g} MiB right, {seconds * 1e3:.3g} ms, "
        f"bus bandwidth {rate:.3g} GB/s"
    )


def nodes_say(found: Mapping[str, Mapping[str, list[str]]], key: str) -> list[str]:
    """Given the result of `verified`, return all nodes' texts under one key, each after the node's name."""
    return [f"{node}: {text}" for node, said in sorted(found.items()) for text in said[key]]


class FilterModule:
    """Filters of the playbooks."""

    def filters(self) -> dict[str, Any]:
        """Return the filters by name."""
        return {"unfit_slices": unfit_slices, "runs_on": runs_on, "verified": verified, "nodes_say": nodes_say}
