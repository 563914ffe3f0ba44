"""What roles refuse in the midst of a run: each refusal names the variable that it comes from, and the way out."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar

from roles.base.library import ca_certificates
from roles.credentials.library import person_credentials
from roles.disks.library import data_disks
from roles.disks.module_utils.disk_state import Disk
from roles.facts.library import managed_files
from roles.facts.module_utils.mount_points import Mounted
from roles.python.library import signing_key
from roles.users.library import people_leave
from tests.roles.conftest import Run

ROLES = Path(__file__).resolve().parents[2] / "roles"
DISK = {"device": "google-data", "path": "/mnt/none-such", "fstype": "ext4"}
#: Signatures as blkid names them.
EXT4 = {"TYPE": "ext4", "UUID": "1"}

Patch = pytest.MonkeyPatch


def templated(text: Any, variables: dict[str, Any]) -> Any:
    """Return a value of a role's files as Ansible hands it on."""
    return Templar(DataLoader(), variables).template(text)


def missing_library(run: Run, folder: Path, patch: Patch) -> str:
    """Preload a library that the worker has elsewhere."""
    return linked(run, folder, "tcmalloc", "__tcmalloc_link", {"tcmalloc_library": "/none/libtcmalloc.so.4"})


SYSTEM, LOCAL = "/usr/lib/x86_64-linux-gnu/libtcmalloc.so.4", "/usr/local/lib/libtcmalloc.so.4"


@pytest.mark.parametrize(
    ("library", "stands", "coming", "wanted", "found"),
    [
        (SYSTEM, "missing", [], True, "faults"),
        (SYSTEM, "missing", ["zsh"], True, "warnings"),
        (SYSTEM, "missing", ["libtcmalloc-minimal4"], True, ""),
        (SYSTEM, "there", [], True, ""),
        (SYSTEM, "missing", [], False, ""),
        (LOCAL, "missing", [], True, "warnings"),
        (LOCAL, "executable", [], True, ""),
    ],
)
def test_a_library_that_surely_lacks_is_a_fault_of_the_variables(
    library: str, stands: str, coming: list[str], wanted: bool, found: str
) -> None:
    named = DataLoader().load_from_file(str(ROLES / "tcmalloc/vars/main.yml"), trusted_as_template=True)
    variables = named | {
        "ansible_facts": {"worker": {"paths": {library: stands}}},
        "facts_coming_packages": coming,
        "tcmalloc_for_runs": wanted,
        "tcmalloc_library": library,
    }
    for kind, words in (("faults", f"{library} is not there, and no "), ("warnings", f"{library} is not there yet; ")):
        said = templated(named[f"__tcmalloc_{kind}"], variables)
        assert [text[: len(f"tcmalloc_library: {words}")] for text in said] == (
            [f"tcmalloc_library: {words}"] if kind == found else []
        )


def missing_timezone(run: Run, folder: Path, patch: Patch) -> str:
    """Set a time zone that the worker does not know."""
    return linked(run, folder, "base", "__base_timezone_files", {"base_timezone": "Mars/Olympus"})


def linked(run: Run, folder: Path, role: str, name: str, variables: dict[str, Any]) -> str:
    """Have a role's link made in a folder."""
    files = DataLoader().load_from_file(str(ROLES / role / "vars/main.yml"), trusted_as_template=True)[name]
    entry = templated(files[0] if isinstance(files, list) else files, variables) | {"path": str(folder / "link")}
    return str(run(managed_files, {"files": [entry]})["msg"])


def credentials(run: Run, name: str) -> str:
    """Give somebody a token, and return what the role says."""
    entry = {"person": name, "kind": "huggingface", "secret": "s3cret"}
    faults = run(person_credentials, {"entries": [entry]})["faults"]
    tasks = DataLoader().load_from_file(str(ROLES / "credentials/tasks/main.yml"), trusted_as_template=True)
    (task,) = (task for task in tasks if task["name"] == "Report what could not be written")
    variables = {"inventory_hostname": "pod-w0", "__credentials_written": {"faults": faults}}
    return str(templated(task["ansible.builtin.fail"]["msg"], variables))


def no_account(run: Run, folder: Path, patch: Patch) -> str:
    """Give a token to nobody."""
    return credentials(run, "nobody-here")


def no_home(run: Run, folder: Path, patch: Patch) -> str:
    """Give a token to somebody whose home is gone."""
    account = pwd.struct_passwd(("ada", "x", os.getuid(), os.getgid(), "", str(folder / "none"), "/bin/sh"))
    patch.setattr(pwd, "getpwnam", lambda _: account)
    return credentials(run, "ada")


def foreign_file(run: Run, folder: Path, patch: Patch) -> str:
    """Give a token to somebody whose file is another's."""
    account = pwd.struct_passwd(("ada", "x", os.getuid(), os.getgid(), "", str(folder), "/bin/sh"))
    patch.setattr(pwd, "getpwnam", lambda _: account)
    (folder / ".cache/huggingface").mkdir(parents=True)
    (folder / ".cache/huggingface/token").touch()
    user = os.geteuid()
    patch.setattr(person_credentials, "as_person", lambda _, work: work())
    patch.setattr(os, "geteuid", lambda: user + 1)
    return credentials(run, "ada")


def leaving(run: Run, folder: Path, patch: Patch, home: Path) -> str:
    """Archive the home of somebody who leaves."""
    account = pwd.struct_passwd(("bob", "x", os.getuid() + 1, os.getgid(), "", str(home), "/bin/sh"))
    patch.setattr(pwd, "getpwnam", lambda _: account)
    patch.setattr(pwd, "getpwall", lambda: [account])
    arguments = {"people": [{"name": "bob", "home": "archive"}], "archive_directory": str(folder / "archives")}
    return str(run(people_leave, arguments, check=True)["msg"])


def foreign_home(run: Run, folder: Path, patch: Patch) -> str:
    """Have a home archived that is another's."""
    return leaving(run, folder, patch, folder)


def home_of_a_file(run: Run, folder: Path, patch: Patch) -> str:
    """Have a home archived that is a file."""
    (folder / "file").touch()
    return leaving(run, folder, patch, folder / "file")


def left_with_a_process(run: Run, folder: Path, patch: Patch) -> str:
    """Have somebody leave whose processes stay."""

    def stay(*_: Any) -> str:
        raise people_leave.Fault("processes [1] survive SIGKILL; reboot the worker and run again")

    patch.setattr(people_leave, "leave", stay)
    patch.setattr(people_leave, "faults_of", lambda _: [])
    patch.setattr(people_leave, "has_left", lambda *_: False)
    arguments = {"people": [{"name": "bob", "home": "keep"}], "archive_directory": str(folder)}
    return str(run(people_leave, arguments)["msg"])


def fetched(run: Run, folder: Path, url: str) -> str:
    """Fetch a key."""
    arguments = {"url": url, "fingerprint": "F2", "path": str(folder / "key.asc")}
    return str(run(signing_key, arguments)["msg"])


def no_key(run: Run, folder: Path, patch: Patch) -> str:
    """Fetch a key that is not there."""
    return fetched(run, folder, f"file://{folder}/none")


def another_key(run: Run, folder: Path, patch: Patch) -> str:
    """Fetch something else than the key."""
    (folder / "text").write_text("x")
    patch.setattr(signing_key, "fetch_url", lambda *_, **__: ((folder / "text").open("rb"), {"status": 200}))
    return fetched(run, folder, "https://keys.test/key")


def no_certificate(run: Run, folder: Path, patch: Patch) -> str:
    """Trust a file without a certificate."""
    return str(run(ca_certificates, {"certificates": ["none"], "directory": str(folder)}, check=True)["msg"])


def disks(run: Run, patch: Patch, there: Mounted | None, names: dict[str, str], **mount: Any) -> str:
    """Mount or unmount a disk on a worker that has it."""
    patch.setattr(data_disks.DataDisks, "disk", lambda *_: Disk("/dev/sdb", "8:16", names, read_only=False))
    patch.setattr(data_disks.DataDisks, "at", lambda *_: there)
    patch.setattr(data_disks, "processes_below", lambda _: "sleep (7)")
    return str(run(data_disks, {"mounts": [DISK | mount]})["msg"])


def other_mount(run: Run, folder: Path, patch: Patch) -> str:
    """Mount a disk where another is mounted."""
    return disks(run, patch, Mounted("8:32", "/mnt/none-such", "rw", "xfs", "/dev/sdc", "rw"), EXT4)


def no_uuid(run: Run, folder: Path, patch: Patch) -> str:
    """Mount a disk whose file system has no UUID."""
    return disks(run, patch, None, {"TYPE": "ext4"})


def busy_mount(run: Run, folder: Path, patch: Patch) -> str:
    """Unmount what somebody uses."""
    there = Mounted("8:16", "/mnt/none-such", "rw", "ext4", "/dev/sdb", "rw")
    patch.setattr(data_disks.DataDisks, "check_absent", lambda *_: None)
    # Nothing is to be unmounted here, whatever goes wrong.
    patch.setattr(data_disks.DataDisks, "run", lambda *_, **__: (1, ""))
    return disks(run, patch, there, EXT4, state="absent")


Refused = Callable[[Run, Path, Patch], str]


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (missing_library, ("tcmalloc_library", "libtcmalloc.so.4, which it is to point to, is missing; set")),
        (missing_timezone, ("base_timezone", "Mars/Olympus, which it is to point to, is missing; set")),
        (no_account, ("credentials_entries of pod-w0: ", "nobody-here has no account; make one, or take")),
        (no_home, ("credentials_entries of pod-w0: ", "is missing; make it: mkhomedir_helper ada")),
        (foreign_file, ("credentials_entries of pod-w0: ", "belongs to somebody else (uid {uid}); chown it")),
        (foreign_home, ("users_people: bob: home: archive", "does not belong to bob; set home: keep, or chown it")),
        (home_of_a_file, ("users_people: bob: home: archive", "is no directory; set home: keep")),
        (left_with_a_process, ("users_people: bob: ", "reboot the worker and run again")),
        (no_key, ("python_deadsnakes_key_url: ", "; set it to where this host can fetch the key")),
        (another_key, ("python_deadsnakes_key_url: ", "of python_deadsnakes_fingerprint; nothing was written")),
        (no_certificate, ("base_ca_certificates[0]: ", "name a file in PEM form")),
        (other_mount, ("disks_mounts: /mnt/none-such: ", "8:32); unmount it, or give another path")),
        (no_uuid, ("disks_mounts: /mnt/none-such: ", "has no UUID; give it one (`tune2fs -U random`)")),
        (busy_mount, ("disks_mounts: /mnt/none-such ", "used by sleep (7): end that and run again")),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_refusal_names_its_variable_and_the_way_out(
    run: Run, tmp_path: Path, monkeypatch: Patch, refused: Refused, words: tuple[str, str]
) -> None:
    said = refused(run, tmp_path, monkeypatch)
    variable, way = words
    assert variable in said
    assert way.format(uid=os.getuid()) in said
    assert "s3cret" not in said
