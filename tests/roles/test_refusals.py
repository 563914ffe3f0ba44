"""Errors of roles during a run: each names its variable and the fix."""

from __future__ import annotations

import errno
import os
import pwd
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar

from roles.base.library import ca_certificates
from roles.credentials.filter_plugins.credentials import credentials_faults
from roles.credentials.library import person_credentials
from roles.disks.filter_plugins.disks import disks_faults
from roles.disks.library import data_disks
from roles.disks.module_utils.disk_state import Disk
from roles.facts.library import managed_files
from roles.facts.module_utils.as_person import PersonFault
from roles.facts.module_utils.mount_points import Mounted
from roles.git.filter_plugins.git import git_faults
from roles.launcher.filter_plugins.launcher import ports_faults
from roles.nfs.filter_plugins.nfs import nfs_faults, own_faults
from roles.nfs.library import nfs_host
from roles.python.filter_plugins import environments
from roles.python.library import signing_key
from roles.users.filter_plugins.people import people_faults, removal_faults
from roles.users.library import people_leave
from roles.workspace.filter_plugins.workspace import workspace_environment_faults, workspace_faults
from roles.workspace.library import git_workspaces
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
    for kind, words in (
        ("faults", f"{library} does not exist, and no "),
        ("warnings", f"{library} does not exist yet; "),
    ):
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
    patch.setattr(person_credentials, "as_person", lambda _, work, **__: work())
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
        raise people_leave.Fault("processes [1] have survived SIGKILL; reboot the worker and run again")

    return left(run, folder, patch, stay)


def left_without_an_archive(run: Run, folder: Path, patch: Patch) -> str:
    """Have somebody leave whose home cannot be archived."""
    return left(run, folder, patch, lambda *_: people_leave.tar("--create", "--file", f"{folder}/none/x", "."))


def left_with_the_account(run: Run, folder: Path, patch: Patch) -> str:
    """Have somebody leave whose account cannot be removed."""
    return left(run, folder, patch, lambda *_: people_leave.command("sh", "-c", "echo it is in use; exit 8"))


def left(run: Run, folder: Path, patch: Patch, leave: Callable[..., Any]) -> str:
    """Remove a person in the way that the test gives."""
    patch.setattr(people_leave, "leave", leave)
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


def exported_mount(run: Run, folder: Path, patch: Patch) -> str:
    """Unmount what the kernel's NFS server exports."""
    (folder / "exports").write_text("# Version 1.1\n/mnt/none-such-else\t*(ro)\n/mnt/none-such/share\t10.0.0.3(rw)\n")
    patch.setattr("ansible.module_utils.disk_state.EXPORTS", str(folder / "exports"))
    return busy_mount(run, folder, patch)


def linked_mount(run: Run, folder: Path, patch: Patch) -> str:
    """Mount a disk behind a symbolic link."""
    (folder / "link").symlink_to("/mnt")
    return disks(run, patch, None, EXT4, path=str(folder / "link"))


def mount_on_a_file(run: Run, folder: Path, patch: Patch) -> str:
    """Mount a disk on a file."""
    (folder / "file").touch()
    return disks(run, patch, None, EXT4, path=str(folder / "file"))


def signed_disk(run: Run, folder: Path, patch: Patch) -> str:
    """Format a disk that blkid knows nothing of, and wipefs does."""
    patch.setattr(data_disks.DataDisks, "run", lambda *_, **__: (0, "0x438 ext4"))
    return disks(run, patch, None, {}, format=True)


def unread_disk(run: Run, folder: Path, patch: Patch) -> str:
    """Format a disk that is failing."""

    def fail(_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    (folder / "disk").touch()
    patch.setattr(data_disks, "first_data", fail)
    patch.setattr(data_disks.DataDisks, "run", lambda *_, **__: (0, ""))
    patch.setattr(data_disks.DataDisks, "disk", lambda *_: Disk(str(folder / "disk"), "8:16", {}, read_only=False))
    return str(run(data_disks, {"mounts": [DISK | {"format": True}]})["msg"])


def disk_without_a_link(run: Run, folder: Path, patch: Patch) -> str:
    """Mount a disk that udev makes no link of."""
    patch.setattr(data_disks, "LINK_TIMEOUT", 0)
    patch.setattr(data_disks.DataDisks, "run", lambda *_, **__: (0, "UUID=none-such\n"))
    return disks(run, patch, None, EXT4)


def disk_mounted_twice(run: Run, folder: Path, patch: Patch) -> str:
    """Mount one disk in two places."""
    patch.setattr(data_disks.DataDisks, "disk", lambda *_: Disk("/dev/sdb", "8:16", EXT4, read_only=False))
    mounts = [DISK, DISK | {"device": "other", "path": "/mnt/second"}]
    return str(run(data_disks, {"mounts": mounts})["msg"])


def exported_file(run: Run, folder: Path, patch: Patch) -> str:
    """Export a file."""
    (folder / "file").touch()
    directory = {"path": str(folder / "file"), "owner": "root", "group": "root", "mode": "0755"}
    return str(run(nfs_host, {"directories": [directory]})["msg"])


def export_without_its_disk(run: Run, folder: Path, patch: Patch) -> str:
    """Export a directory of a disk that is not mounted."""
    rights = {"owner": str(os.getuid()), "group": str(os.getgid()), "mode": "0755"}
    directory = {"path": str(folder / "disk" / "share"), "disk": str(folder / "disk"), **rights}
    said = str(run(nfs_host, {"directories": [directory]})["msg"])
    assert not (folder / "disk").exists()
    assert "msg" not in run(nfs_host, {"directories": [directory]}, check=True), "it mounts no disk"
    return said


def exported_read_only(run: Run, folder: Path, patch: Patch) -> str:
    """Export a directory of a file system that can only be read."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    patch.setattr("os.fchown", refuse)
    patch.setattr("os.fchmod", refuse)
    directory = {"path": str(folder), "owner": "4711", "group": "4711", "mode": "0755"}
    file = {"path": str(folder / "exports"), "content": "", "takes": "reload"}
    patch.setattr(nfs_host.NfsHost, "kernel_has", lambda *_: True)
    patch.setattr(nfs_host.NfsHost, "withdraw", lambda *_: None)
    return str(run(nfs_host, {"directories": [directory], "files": [file]})["msg"])


def project_of_no_group(run: Run, folder: Path, patch: Patch) -> str:
    """Give a project to a group that the worker does not have."""
    module = SimpleNamespace(check_mode=False, params={"timeout": 1, "uv": "uv", "pinned_packages": []})
    project = {"name": "vision", "path": str(folder), "mode": "0755", "group": "none-such", "environment": "/none"}
    workspace = git_workspaces.Workspace(module, project, pwd.getpwuid(os.getuid()))
    with pytest.raises(PersonFault) as refused:
        workspace.set_rights()
    return str(refused.value)


Refused = Callable[[Run, Path, Patch], str]


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (missing_library, ("tcmalloc_library", "libtcmalloc.so.4 is missing; set")),
        (missing_timezone, ("base_timezone", "Mars/Olympus is missing; set")),
        (no_account, ("credentials_entries of pod-w0: ", "nobody-here has no account; create one, or remove")),
        (no_home, ("credentials_entries of pod-w0: ", "is missing; create it: mkhomedir_helper ada")),
        (foreign_file, ("credentials_entries of pod-w0: ", "belongs to somebody else (uid {uid}); chown it")),
        (foreign_home, ("users_people: bob: home: archive", "does not belong to bob; set home: keep, or chown it")),
        (home_of_a_file, ("users_people: bob: home: archive", "is not a directory; set home: keep")),
        (left_with_a_process, ("users_people: bob: ", "reboot the worker and run again")),
        (
            left_without_an_archive,
            ("users_people: bob: tar says: ", "; the home is untouched: fix this error and run again"),
        ),
        (left_with_the_account, ("users_people: bob: sh says: ", "it is in use; fix this error and run again")),
        (no_key, ("python_deadsnakes_key_url: ", "; set it to an address where this host can fetch the key")),
        (another_key, ("python_deadsnakes_key_url: ", "of python_deadsnakes_fingerprint; nothing was written")),
        (no_certificate, ("base_ca_certificates[0]: ", "name a PEM file")),
        (other_mount, ("disks_mounts: /mnt/none-such: ", "8:32); unmount it, or give another path")),
        (no_uuid, ("disks_mounts: /mnt/none-such: ", "has no UUID; give it one (`tune2fs -U random`)")),
        (linked_mount, ("disks_mounts: ", "through a symbolic link to /mnt; give that path")),
        (mount_on_a_file, ("disks_mounts: ", "is not a directory; move it away, or give another path")),
        (
            signed_disk,
            ("disks_mounts: /mnt/none-such: ", "needs what is on the disk, empty it by hand (`blkdiscard -z`)"),
        ),
        (
            disk_without_a_link,
            ("none-such did not appear within 0 s", "(`journalctl -u systemd-udevd`) and run again"),
        ),
        (
            disk_mounted_twice,
            ("disks_mounts: /mnt/second: ", "/mnt/none-such; remove one of the two entries, or name another disk"),
        ),
        (
            exported_read_only,
            ("nfs_exports: ", ": Read-only file system; if the directory is on a read-only file system, name"),
        ),
        (
            unread_disk,
            ("disks_mounts: /mnt/none-such: ", "/disk cannot be read (Input/output error); name another disk"),
        ),
        (exported_file, ("nfs_exports: ", "or is behind a symbolic link; give the path of the directory itself")),
        (
            export_without_its_disk,
            ("nfs_exports: ", "/disk; run again with --tags disks,nfs, which mounts the disk or says why not"),
        ),
        (
            project_of_no_group,
            ("this worker has no group none-such", "; set group in workspace_projects, or create the group"),
        ),
        (busy_mount, ("disks_mounts: /mnt/none-such ", "used by sleep (7): end that and run again")),
        (
            exported_mount,
            (
                "disks_mounts: /mnt/none-such ",
                "the NFS export of /mnt/none-such/share (if nfs_exports no longer lists it",
            ),
        ),
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


def of_disks(*changes: dict[str, Any]) -> list[str]:
    """Return the faults of data disks, each another one that is changed."""
    mounts = [{"device": f"disk-{position}", "path": f"/mnt/{position}"} for position, _ in enumerate(changes)]
    return disks_faults([mount | change for mount, change in zip(mounts, changes, strict=True)], [], [])


def of_nfs(host: str = "a", **changes: Any) -> list[str]:
    """Return the faults of an export of the host a that the host b mounts, on one of them."""
    nfs = {
        "host": host,
        "exports": [{"path": "/srv/x", "server": "a"}],
        "mounts": [{"path": "/mnt/x", "export": "/srv/x"}],
        "options": [],
        "ganesha_core": {},
        "allow_preemptible": False,
        "disks": [],
    }
    hosts = {"a": {"nfs_address": changes.pop("address", "10.0.0.1")}, "b": {"nfs_address": "10.0.0.2"}}
    nfs |= changes
    return nfs_faults(nfs, hosts, {"all": ["a", "b"], "empty": []}) + own_faults(nfs, ["root"], ["root"])


def of_exports(*changes: dict[str, Any]) -> list[str]:
    """Return the faults of exports of the host a, as the host b sees them."""
    return of_nfs("b", mounts=[], exports=[{"path": "/srv/x", "server": "a"} | change for change in changes])


def of_mounts(*changes: dict[str, Any], **more: Any) -> list[str]:
    """Return the faults of mounts of the host b."""
    return of_nfs("b", mounts=[{"path": "/mnt/x", "export": "/srv/x"} | change for change in changes], **more)


ED25519 = "AAAAC3NzaC1lZDI1NTE5AAAA" + 44 * "A"
FORGE = {"forge.test": [f"ssh-ed25519 {ED25519}"]}
PRIVATE = "-----BEGIN {0}PRIVATE KEY-----\n{1}\n-----END {0}PRIVATE KEY-----\n"


def of_git(people: list[Any] | None = None, keys: Any = FORGE["forge.test"], **deploy: str) -> list[str]:
    """Return the faults of git's people, of a forge's keys, or of a deploy key."""
    deploy_keys = [{"host": "forge.test", "key": PRIVATE.format("", "x")} | deploy] if deploy else []
    return git_faults(people or [], {}, {"forge.test": keys}, deploy_keys, {"accounts": ["ada"], "groups": []})


def of_workspace(*changes: dict[str, Any]) -> list[str]:
    """Return the faults of projects."""
    project = {"name": "vision", "url": "/srv/vision.git"}
    return workspace_faults([project | change for change in changes], "/opt", {"accounts": ["root"], "groups": []})


def of_python(*changes: dict[str, Any]) -> list[str]:
    """Return the faults of environments."""
    listed = [{"name": "tools"} | change for change in changes]
    return environments.environment_faults(listed, {"3.12": {}}, "3.12", ["root"])


def of_lock(lock: str) -> list[str]:
    """Return the faults of a lock file that is to have numpy 2."""
    entry = {"name": "tools", "lock": "tools.txt", "requirements": ["numpy==2"]}
    return environments.environment_lock_faults([entry], [lock])


def of_credentials(*changes: dict[str, Any]) -> list[str]:
    """Return the faults of entries."""
    entry = {"person": "ada", "kind": "git", "host": "forge.test", "login": "ada", "secret": "s3cret"}
    return credentials_faults([entry | change for change in changes], {"TOKEN": "s3cret"}, ["ada"])


def of_people(**changes: Any) -> list[str]:
    """Return the faults of a person."""
    return people_faults({"users_people": [{"name": "ada"} | changes]})


ACCOUNT = "lowercase letters, digits, - and _, not starting with a digit or -"
LETTERS = f"use at most 32 {ACCOUNT}"
ANEW = "recreate it with `uv pip compile`"
PUBLISHED = "copy the whole line that the forge publishes"
PUBLIC = "copy the whole line of the .pub file"


@pytest.mark.parametrize(
    ("faults", "variable", "way"),
    [
        (lambda: of_disks({"uuid": "1234-abcd"}), "disks_mounts[0]: ", "remove the others"),
        (lambda: of_disks({"device": "a b"}), "disks_mounts[0]: ", "give one that `ls` lists there"),
        (
            lambda: of_disks({"device": "", "uuid": "x"}),
            "disks_mounts[0]: ",
            "give one that `blkid` lists on the worker",
        ),
        (lambda: of_disks({"read_only": True, "mode": "0755"}), "disks_mounts[0]: ", "remove one of them"),
        (lambda: of_disks({"options": ["a,b"]}), "disks_mounts[0]: ", "list each separately, for example noatime"),
        (lambda: of_disks({"options": ["ro"]}), "disks_mounts[0]: ", "remove this option"),
        (lambda: of_disks({"path": "/mnt/a"}, {"path": "/mnt/a"}), "disks_mounts: ", "remove one of them"),
        (
            lambda: of_disks({"device": "a"}, {"device": "a"}),
            "disks_mounts: ",
            "remove one of them, or name another disk",
        ),
        (
            lambda: of_nfs("b", mounts=[], address="nas"),
            "nfs_exports[0]: /srv/x: ",
            "set it to the host's internal address",
        ),
        (lambda: of_exports({}, {"server": "b"}), "nfs_exports: ", "remove one of them, or give it another path"),
        (lambda: of_exports({}, {}), "nfs_exports: ", "remove one of them"),
        (lambda: of_exports({}, {"path": "/srv/x/y"}), "nfs_exports: ", "export directories next to each other"),
        (
            lambda: of_mounts({"export": "/srv/y"}),
            "nfs_mounts[0]: ",
            "add an export with this path, or set export to another path",
        ),
        (
            lambda: of_mounts({"server": "a", "export": "/srv/y"}),
            "nfs_mounts[0]: ",
            "add this export, or set server and export to another",
        ),
        (lambda: of_mounts({"options": ["ro"]}), "nfs_mounts[0]: ", "remove this option"),
        (lambda: of_mounts({"options": ["a,b"]}), "nfs_mounts[0]: ", "list each separately, for example soft"),
        (lambda: of_mounts({}, disks=[{"path": "/mnt/x"}]), "nfs_mounts[0]: ", "choose a path next to that one"),
        (
            lambda: of_mounts({}, exports=[{"path": "/srv/x", "server": "a", "clients": ["a"]}]),
            "nfs_mounts[0]: ",
            "add the host to the clients, or remove this mount from the host's nfs_mounts",
        ),
        (lambda: of_mounts({}, {}), "nfs_mounts: ", "remove one of them"),
        (
            lambda: of_nfs(mounts=[{"path": "/srv/x/y", "export": "/srv/x"}]),
            "nfs_mounts[0]: ",
            "choose a path next to the exported one, or the same path",
        ),
        (lambda: of_nfs(ganesha_core={"a b": 1}), "nfs_ganesha_core: ", "use only letters and _, as in Nb_Worker"),
        (lambda: of_git(people=[{"person": "ada"}] * 2), "git_people[1]: ", "remove one of them"),
        (lambda: of_git(keys=[]), "git_host_keys: forge.test ", "list each as TYPE BASE64"),
        (lambda: of_git(keys=["ssh-ed25519 AAAA x"]), "git_host_keys: forge.test[0] ", "give only type and key"),
        (lambda: of_git(keys=["ssh-ed25519 AAAA"]), "git_host_keys: forge.test[0] ", PUBLISHED),
        (lambda: of_git(alias="a b"), "git_deploy_keys[0]: ", "give one such as work.forge.test"),
        (lambda: of_git(alias="forge.test"), "git_deploy_keys[0]: ", "choose another alias"),
        (lambda: of_git(group="g"), "git_deploy_keys[0]: ", "set group, or list g for this node"),
        (lambda: of_git(key="x"), "git_deploy_keys[0]: ", "give the whole content of its file"),
        (
            lambda: of_git(key=PRIVATE.format("OPENSSH ", "x")),
            "git_deploy_keys[0]: ",
            "give the whole content of its file, unchanged",
        ),
        (
            lambda: of_git(key=PRIVATE.format("ENCRYPTED ", "x")),
            "git_deploy_keys[0]: ",
            "remove it with ssh-keygen -p",
        ),
        (
            lambda: of_workspace({}, {"path": "/opt/b"}),
            "workspace_projects[1]: ",
            "remove one of the two entries, or give it another name",
        ),
        (
            lambda: of_workspace({}, {"name": "b", "path": "/opt/vision/b"}),
            "workspace_projects[1]: ",
            "choose a path next to that one",
        ),
        (lambda: of_workspace({"group": "g"}), "workspace_projects[0]: ", "set group, or list g for this node"),
        (
            lambda: workspace_environment_faults([{"name": "vision", "environment": "venv"}], "", []),
            "workspace_projects[0]: ",
            "name one, or give a path that starts with /, without spaces or ..",
        ),
        (
            lambda: environments.python_faults([{"version": "3.12"}] * 2, "distribution", "", "0.13.9", []),
            "python_more_versions: ",
            "remove one of the two entries",
        ),
        (lambda: of_python({}, {"path": "/opt/b"}), "python_environments: ", "change one of the two"),
        (lambda: of_python({"path": "venv"}), "python_environments[0].path: ", "give a path such as /opt/venvs/a"),
        (lambda: of_lock(""), "python_environments[0].lock: ", ANEW),
        (lambda: of_lock("jax==1\n"), "python_environments[0].lock: ", ANEW),
        (lambda: of_lock("numpy==1\n"), "python_environments[0].lock: ", ANEW),
        (
            lambda: environments.missing_lock_faults([{"name": "tools", "lock": "/none"}], "/", ["/none"]),
            "python_environments[0].lock: ",
            "create it, or name another",
        ),
        (lambda: environments.login_faults("", {"A": ""}, []), "python_active_environments: ", f"use {ACCOUNT}"),
        (lambda: ports_faults([9000, 8000]), "launcher_ports: ", "swap them"),
        (lambda: ports_faults([80, 90]), "launcher_ports: ", "choose a range within these"),
        (lambda: ports_faults([8000, 8100]), "launcher_ports: ", "omit these"),
        (lambda: of_credentials({"from_env": "TOKEN"}), "credentials_entries[0]: ", "remove one of the two"),
        (
            lambda: of_credentials({"secret": "", "from_env": "a-b"}),
            "credentials_entries[0]: ",
            "give only its name, such as HF_TOKEN",
        ),
        (
            lambda: of_credentials({"secret": ""}),
            "credentials_entries[0]: ",
            "add it, or name an environment variable in from_env",
        ),
        (
            lambda: of_credentials({"login": ""}),
            "credentials_entries[0]: ",
            "add it, or name an environment variable in login_from_env",
        ),
        (lambda: of_credentials({"host": "", "state": "absent"}), "credentials_entries[0]: ", "add it"),
        (lambda: of_credentials({"secret": "s3cret x"}), "credentials_entries[0]: ", "remove these"),
        (
            lambda: of_credentials({"kind": "file", "path": "../x"}),
            "credentials_entries[0]: ",
            "give one such as .config/token",
        ),
        (lambda: of_credentials({}, {}), "credentials_entries[1]: ", "remove one of the two entries"),
        (lambda: of_people(keys=["a\nb"]), "users_people[0]: ", "list each key separately"),
        (lambda: of_people(keys=["ssh-ed25519 AAAA!"]), "users_people[0]: ", PUBLIC),
        (lambda: of_people(keys=["ssh-ed25519 AAAA"]), "users_people[0]: ", PUBLIC),
        (lambda: of_people(groups=["tpu-run"]), "users_people[0]: ", "set sudo: launcher instead"),
        (lambda: of_people(groups=["docker"]), "users_people[0]: ", "set sudo: full as well, or remove the group"),
        (lambda: of_people(groups=["a b"]), "users_people[0]: ", LETTERS),
        (lambda: of_people(groups=["1a"]), "users_people[0]: ", LETTERS),
        (lambda: of_people(name="3com"), "users_people[0]: ", LETTERS),
        (lambda: removal_faults(["a b"]), "users_remove_metadata_keys[0]: ", LETTERS),
    ],
)
def test_a_fault_of_variables_names_them_and_ends_in_the_way_out(
    faults: Callable[[], list[str]], variable: str, way: str
) -> None:
    (said,) = faults()
    assert said.startswith(variable)
    assert said.endswith(f"; {way}")
    assert "s3cret" not in said
