"""Checks of this machine: what tpu_ops needs here before it can reach the API and workers."""

from __future__ import annotations

import email.utils
import platform
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import NamedTuple
from urllib.error import HTTPError

from tpu_ops import texts
from tpu_ops.cloud import quotas
from tpu_ops.cloud.listing import list_nodes
from tpu_ops.config import Settings
from tpu_ops.errors import OpsError
from tpu_ops.fleet import origin
from tpu_ops.fleet.publishing import sources
from tpu_ops.ssh import identities

#: A clock that is further off makes Google refuse credentials, in seconds.
CLOCK_LIMIT = 60.0
#: Where Google tells the time, without credentials.
_GOOGLE = "https://tpu.googleapis.com/"
#: Seconds for an answer.
_TIMEOUT = 10.0
#: Number of quotas that the check names.
_NAMED = 8


class Check(NamedTuple):
    """One check.

    Attributes:
        name: What was checked, in a word.
        passed: Whether it passed; None if that cannot be known.
        said: What was found.
        fix: What the user does if it has not passed.
    """

    name: str
    passed: bool | None
    said: str
    fix: str = ""


def examine(load: Callable[[], Settings]) -> Iterator[Check]:
    """Check this machine for a fleet, one check after the other.

    Args:
        load: Returns the settings of the fleet. Its error is a check that has failed, and ends the checks.
    """
    yield Check("python", True, f"Python {platform.python_version()}")
    for program, package in (("ssh", "openssh-client"), ("rsync", "rsync")):
        yield _program(program, package)
    try:
        settings = load()
    except OpsError as exc:
        yield _failed("fleet", exc)
        return
    yield Check("fleet", True, str(settings.file))
    yield _checked("key", lambda: _key(settings))
    if fault := identities.agent_fault():
        yield Check("agent", False, fault, "start an agent, or unset SSH_AUTH_SOCK if your key has no passphrase")
    yield _checked("api", lambda: _api(settings))
    yield _quota(settings)
    yield _clock(settings)


def _checked(name: str, check: Callable[[], Check]) -> Check:
    """Return a check; an error of tpu_ops is one that has failed."""
    try:
        return check()
    except OpsError as exc:
        return _failed(name, exc)


def _failed(name: str, failure: OpsError) -> Check:
    said = f"{failure.what} ({failure.where})" if failure.where else failure.what
    return Check(name, False, said, failure.fix)


def _program(name: str, package: str) -> Check:
    if not shutil.which(name):
        return Check(name, False, f"{name} is not installed", f"apt-get install {package}")
    done = subprocess.run([name, "-V"], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    said = (done.stderr or done.stdout).splitlines()
    return Check(name, True, said[0] if said else name)


def _key(settings: Settings) -> Check:
    identities.ssh_keys(settings)
    if settings.private_key and (fault := identities.fault(settings.private_key)):
        return Check("key", False, fault, "correct that, or set another key: private_key in the fleet's file")
    return Check("key", True, f"{settings.private_key}, for the account {settings.user}")


def _api(settings: Settings) -> Check:
    if source := origin.source_of(settings):
        return Check("api", None, f"this fleet is read from a published snapshot: {sources.shown(source)}")
    if not settings.projects:
        return Check("api", False, "no project is set", "set `projects` in inventory/tpu_vm.yml, or TPU_OPS_PROJECT")
    with origin.api(settings) as tpu:
        found = list_nodes(tpu, settings.projects, settings.zones, strict_permissions=True)
    count = texts.count(len(found.nodes), "node")
    where = f"project {texts.some(settings.projects)}"
    return Check("api", True, f"the Cloud TPU API answers for {where}: {count}")


def _quota(settings: Settings) -> Check:
    """Check that a project has a quota for TPUs. It is no fault if the API is not enabled: only this check needs it."""
    if settings.endpoint or not settings.projects or origin.source_of(settings):
        return Check("quota", None, "not asked, since the fleet's nodes do not come from Google's API")
    found, unknown, fix = [], "", ""
    for project in settings.projects:
        try:
            found += quotas.of_project(project, settings.auth, timeout=_TIMEOUT)
        except OpsError as exc:
            unknown, fix = exc.what, f"gcloud services enable cloudquotas.googleapis.com --project {project}"
    if found:
        named = texts.some([f"{each.name} {each.value} in {each.place}" for each in found], _NAMED)
        return Check(
            "quota", True, f"{named}; of another project it is not known: {unknown}" if unknown else named, fix
        )
    if unknown:
        return Check("quota", None, f"not known: {unknown}", fix)
    return Check("quota", False, "there is none for TPUs", "apply for a grant, or ask for quota (docs/trc.md)")


def _clock(settings: Settings) -> Check:
    place = settings.rest_endpoint or ("" if settings.endpoint else _GOOGLE)
    if not place:
        return Check("clock", None, "not compared with Google's, since another endpoint is set")
    try:
        began = time.time()
        try:
            with urllib.request.urlopen(place, timeout=_TIMEOUT) as answer:  # noqa: S310 - https, or loopback
                date = answer.headers["Date"]
        except HTTPError as exc:  # an answer as well: there is nothing at this place
            date = exc.headers["Date"]
        off = (began + time.time()) / 2 - email.utils.parsedate_to_datetime(date).timestamp()
    except (OSError, ValueError, TypeError) as exc:
        return Check("clock", None, f"not compared: {getattr(exc, 'reason', exc)}", "check the way to Google")
    # The header has whole seconds.
    if abs(off) <= CLOCK_LIMIT:
        return Check("clock", True, f"within {max(1.0, abs(off)):.0f} s of the API's")
    return Check("clock", False, f"{off:+.0f} s off: Google refuses credentials then", "timedatectl set-ntp true")
