#!/usr/bin/python
"""Module that runs a Python script on a worker in the environment of a training run; supports Python 3.8."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from typing import Any, BinaryIO

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: slice_worker
short_description: Run a Python script in the environment of training runs, as the login user
description:
  - Uses the environment files and virtual environment of the launcher's configuration. The script gets no other
    variables, as in a run.
  - Ends the script and all its child processes after O(timeout).
  - An error is returned as C(fault) and is not a failure, so that all workers of a slice can be judged together.
options:
  script:
    description: Text of the script. It prints a JSON object as its last line.
    type: str
    required: true
  asked:
    description: The only argument of the script, passed as JSON.
    type: dict
    required: true
  timeout:
    description: Seconds for the script.
    type: int
    required: true
  alone:
    description:
      - Whether the slice is one of several of a queued resource. JAX, which finds the others through the metadata
        server, is then told that there are none; otherwise it would wait for them.
    type: bool
    default: false
author: [tpu_ops]
"""

EXAMPLES = r"""
- name: Count the devices
  slice_worker:
    script: 'import jax, json; print(json.dumps({"devices": jax.device_count()}))'
    asked: {}
    timeout: 60
"""

RETURN = r"""
report:
  description: The JSON object that the script printed.
  type: dict
  returned: always
fault:
  description: The error; empty if there was none.
  type: str
  returned: always
"""

#: The launcher, which is a zip archive: modules can be imported from it.
PROGRAM = "/usr/local/sbin/tpu-host"
#: Seconds to wait after SIGTERM before SIGKILL: JAX ignores SIGTERM while it waits for other workers.
GRACE = 10
#: The maximum number of error lines that are shown if a script fails.
SHOWN_LINES = 3


class CannotRunError(Exception):
    """The worker cannot run the script."""


def environment(program: str = PROGRAM, *, alone: bool = False) -> dict[str, str]:
    """Return the environment variables with which a training run of the login user would start.

    Args:
        program: The path of the launcher.
        alone: Whether to unset the variables that connect the slice with other slices.

    Raises:
        CannotRunError: The launcher is missing, or its configuration is invalid.
    """
    sys.path.insert(0, os.path.realpath(program))
    try:
        # All names are from one module, which launchers of every version contain.
        from tpu_ops.host.environment import MEGASCALE, SYSTEM_PATH, Refused, from_files, load_config
    except ImportError as exc:
        raise CannotRunError(
            "the launcher {} cannot be imported ({}); site.yml installs it".format(program, exc)
        ) from exc
    finally:
        del sys.path[0]
    try:
        config = load_config()
        from_host = from_files(config["environment_files"])
    except Refused as exc:
        raise CannotRunError(str(exc)) from exc
    person = pwd.getpwuid(os.getuid())
    found = {"HOME": person.pw_dir, "USER": person.pw_name, "LOGNAME": person.pw_name, "LANG": "C.UTF-8"}
    found["VIRTUAL_ENV"] = config["venv"]
    found["PATH"] = os.path.join(config["venv"], "bin") + ":" + SYSTEM_PATH
    found.update(from_host)
    if alone:
        found.update(dict.fromkeys(MEGASCALE, ""))
    return found


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its child processes: SIGTERM first, since SIGINT can leave a TPU unusable."""
    for number, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, GRACE)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def remove_own(paths: Iterable[str]) -> None:
    """Remove those of some files that belong to the login user; in /tmp only root can remove the files of others."""
    for path in paths:
        with contextlib.suppress(OSError):
            if os.lstat(path).st_uid == os.getuid():
                os.unlink(path)


def text(stream: BinaryIO) -> list[str]:
    """Return the non-empty lines of an open file that a command has written to."""
    stream.seek(0)
    lines = stream.read().decode("utf-8", "replace").splitlines()
    return [line.strip() for line in lines if line.strip()]


def run(argv: list[str], variables: dict[str, str], timeout: float) -> tuple[dict[str, Any], str]:
    """Run a command; return the JSON object in its last line of output, and the error, which is empty on success.

    Args:
        argv: The command.
        variables: The command's environment variables.
        timeout: Seconds after which the command is ended.
    """
    # Files, not pipes: a child that outlives the script would keep a pipe open.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                argv,
                env=variables,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
        except OSError as exc:
            return {}, "{}: {}; site.yml installs it".format(argv[0], exc.strerror)
        late = False
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            late = True
        end(process)
        printed, said = text(output), " | ".join(text(errors)[-SHOWN_LINES:])
    if late:
        return {}, "the script did not end within {:.0f} s and was terminated{}".format(timeout, said and ": " + said)
    if process.returncode:
        return {}, "exited with {}: {}".format(process.returncode, said or "no message")
    try:
        report = json.loads(printed[-1])
    except (IndexError, ValueError):
        return {}, "printed no result: {}".format(said or "no message")
    return report, ""


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "script": {"type": "str", "required": True},
            "asked": {"type": "dict", "required": True},
            "timeout": {"type": "int", "required": True},
            "alone": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    try:
        variables = environment(alone=module.params["alone"])
    except CannotRunError as exc:
        module.exit_json(changed=False, report={}, fault=str(exc))
    python = os.path.join(variables["VIRTUAL_ENV"], "bin", "python")
    argv = [python, "-I", "-c", module.params["script"], json.dumps(module.params["asked"])]
    from tpu_ops.host.ending import LOCKFILES

    # libtpu leaves its lockfile behind, and JAX of another user cannot open that file. So the new lockfiles are
    # removed.
    new = [path for path in LOCKFILES if not os.path.lexists(path)]
    report, fault = run(argv, variables, module.params["timeout"])
    remove_own(new)
    module.exit_json(changed=False, report=report, fault=fault)


if __name__ == "__main__":
    main()
