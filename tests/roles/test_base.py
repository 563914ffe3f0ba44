from __future__ import annotations

import os
import re
import ssl
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar

from roles.base.filter_plugins.base import (
    certificate_faults,
    certificate_paths,
    clock,
    clock_faults,
    hugepages_wanted,
)
from roles.base.library import apt_mirrors, hugepages
from roles.facts.library import apt_lists, managed_files
from roles.facts.module_utils import text_files
from tests.support.role_tasks import run_tasks

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., dict[str, Any]]


@pytest.mark.parametrize(
    ("setting", "accelerator_type", "wanted"),
    [
        ("auto", "v4-32", ""),
        ("auto", "v3-8", ""),
        ("auto", "v2-8", ""),
        ("auto", "v5litepod-16", "always"),
        ("auto", "v5p-16", "always"),
        ("auto", "v6e-8", "always"),
        ("auto", "", ""),
        ("never", "v5p-16", "never"),
        ("always", "v4-8", "always"),
        ("keep", "v6e-8", ""),
    ],
)
def test_hugepages_are_on_from_v5e_unless_said_otherwise(setting: str, accelerator_type: str, wanted: str) -> None:
    assert hugepages_wanted(setting, accelerator_type) == wanted


@pytest.mark.parametrize(
    ("units", "package"),
    [
        ([], "systemd-timesyncd"),
        (["systemd-timesyncd.service"], "systemd-timesyncd"),
        (["systemd-timesyncd.service", "chrony.service"], "chrony"),
        (["openntpd.service"], "openntpd"),
    ],
)
def test_an_existing_time_service_keeps_the_clock_else_timesyncd(units: list[str], package: str) -> None:
    assert clock({unit: {} for unit in units})["package"] == package


@pytest.mark.parametrize(
    ("package", "readers", "servers", "sync", "fault"),
    [
        ("systemd-timesyncd", [], ["a.test"], True, None),
        ("chrony", ["/etc/chrony/chrony.conf"], ["a.test"], True, None),
        ("chrony", [], [], True, None),
        ("chrony", [], ["a.test"], False, None),
        ("chrony", [], ["a.test"], True, "its configuration does not read /etc/chrony/sources.d"),
        (
            "ntpsec",
            ["unknown"],
            ["a.test"],
            True,
            "and this role cannot set its servers",
        ),
    ],
)
def test_servers_that_nothing_would_ask_are_refused(
    package: str, readers: list[str], servers: list[str], sync: bool, fault: str | None
) -> None:
    found = clock_faults(servers, sync, package, readers)
    assert len(found) == (fault is not None)
    assert (fault or "") in "".join(found)


def test_chrony_prefers_the_servers_that_are_listed() -> None:
    variables: dict[str, Any] = DataLoader().load_from_file("roles/base/vars/main.yml", trusted_as_template=True) | {
        "__base_clock": {"package": "chrony"},
        "base_time_sync": True,
        "base_ntp_servers": ["a.test", "10.0.0.1"],
    }
    templar = Templar(DataLoader(), variables)
    (file,) = (file for file in variables["__base_files"] if file["path"] == CHRONY)
    assert templar.template(file["state"]) == "file"
    lines = templar.template(file["content"]).splitlines()
    assert lines[1:] == ["server a.test iburst prefer", "server 10.0.0.1 iburst prefer"]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return a certificate in PEM form."""
    path = tmp_path_factory.mktemp("authority") / "authority.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=x -keyout /dev/null -out"
    subprocess.run([*command.split(), str(path)], check=True, capture_output=True, timeout=30)
    return path.read_bytes()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text, None),
        (lambda text: "# Autorité\n".encode() + text + b"# another\r\n" + text.replace(b"\n", b"\r\n"), None),
        (lambda text: None, "No such file or directory"),
        (lambda text: b"$ANSIBLE_VAULT;1.1;AES256\n6162\n", None),
        (lambda text: b"", "it contains no certificate"),
        (lambda text: ssl.PEM_cert_to_DER_cert(text.decode()), "it contains no certificate"),
        (lambda text: text.replace(b"CERTIFICATE", b"PRIVATE KEY"), "it contains no certificate"),
        (lambda text: text.replace(text[100:140], b""), "a certificate in it is damaged"),
        (lambda text: text + text.replace(text[100:140], b""), "a certificate in it is damaged"),
    ],
)
def test_certificates_of_the_controller_are_read_before_the_first_change(
    tmp_path: Path, authority: bytes, change: Callable[[bytes], bytes | None], said: str | None
) -> None:
    content = change(authority)
    if content is not None:
        (tmp_path / "ca.pem").write_bytes(content)
    (tmp_path / "right.pem").write_bytes(authority)
    paths = certificate_paths(["ca.pem", str(tmp_path / "right.pem")], str(tmp_path))
    where = f"base_ca_certificates[0]: {tmp_path}/ca.pem on this machine: "
    assert certificate_faults(paths) == ([f"{where}{said}; name a PEM file"] if said else [])


def test_the_controllers_own_certificates_are_right(tmp_path: Path) -> None:
    assert certificate_faults(certificate_paths(["~/none.pem"], str(tmp_path)))[0].startswith(
        f"base_ca_certificates[0]: {Path.home()}/none.pem on this machine: "
    )
    (fault,) = certificate_faults(certificate_paths(["~nobodyx/x.pem"], str(tmp_path)))
    assert fault.startswith(f"base_ca_certificates[0]: {tmp_path}/~nobodyx/x.pem on this machine: No such file")
    bundle = ssl.get_default_verify_paths().cafile
    assert bundle is None or certificate_faults([bundle]) == []


@pytest.mark.parametrize("trusted", [["/etc/ssl/proxy.pem"], []])
def test_logins_know_the_system_s_certificates_while_there_are_more(trusted: list[str]) -> None:
    files = DataLoader().load_from_file("roles/base/vars/main.yml", trusted_as_template=True)[
        "__base_environment_files"
    ]
    (entry,) = Templar(DataLoader(), {"base_ca_certificates": trusted}).template(files)
    bundle = "SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt" if trusted else ""
    assert (entry["path"], entry["state"], entry["content"]) == ("/etc/environment", "block", bundle)


@pytest.mark.parametrize(
    ("own", "kept"),
    [("SSL_CERT_FILE=/mine\n", True), ("  export SSL_CERT_FILE=/mine\n", True), ("#SSL_CERT_FILE=/mine\n", False)],
)
def test_logins_keep_certificates_that_somebody_chose_for_them(run: Run, tmp_path: Path, own: str, kept: bool) -> None:
    files = DataLoader().load_from_file("roles/base/vars/main.yml", trusted_as_template=True)[
        "__base_environment_files"
    ]
    (entry,) = Templar(DataLoader(), {"base_ca_certificates": ["/etc/ssl/proxy.pem"]}).template(files)
    path = tmp_path / "environment"
    block = f"# BEGIN tpu_ops\n{entry['content']}\n# END tpu_ops\n"
    asked = {"files": [entry | {"path": str(path)}]}
    for text, after in ((own, own if kept else own + block), (own + block, own + block)):
        path.write_text(text)
        assert run(managed_files, asked)["changed"] is (text != after)
        assert path.read_text() == after
        assert run(managed_files, asked)["changed"] is False


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("deb http://a.example/ubuntu jammy main\n", "deb https://m.example/u jammy main\n"),
        (
            "deb [arch=amd64] http://a.example/ubuntu/ jammy main\n",
            "deb [arch=amd64] https://m.example/u/ jammy main\n",
        ),
        ("URIs: http://a.example/ubuntu\nSuites: noble\n", "URIs: https://m.example/u\nSuites: noble\n"),
        (
            "URIs: http://a.example/ubuntu-security http://a.example/ubuntu",
            "URIs: http://a.example/ubuntu-security https://m.example/u",
        ),
        ("deb http://a.example/ubuntu/special jammy main\n", "deb https://s.example jammy main\n"),
        ("# deb http://a.example/ubuntu jammy main\n", "# deb http://a.example/ubuntu jammy main\n"),
        ("deb https://m.example/u jammy main\n", "deb https://m.example/u jammy main\n"),
        (
            "deb http://other.example/http://a.example/ubuntu x\n",
            "deb http://other.example/http://a.example/ubuntu x\n",
        ),
    ],
)
def test_exactly_the_addresses_of_mirrors_are_replaced(before: str, after: str) -> None:
    mirrors = {
        "http://a.example/ubuntu/": "https://m.example/u",
        "http://a.example/ubuntu/special": "https://s.example/",
    }
    assert apt_mirrors.mirrored(before, mirrors) == after


def places(folder: Path) -> dict[str, str]:
    """Return where the module finds apt's files and keeps its record."""
    return {"directory": str(folder), "record": str(folder / "state" / "record.json")}


SOURCES = """\
Types: deb
URIs: http://a.example/ubuntu
Suites: x

Types: deb
URIs: http://security.example/ubuntu
Suites: x-security
"""
BOTH = {"http://a.example": "http://m.example", "http://security.example": "http://m.example"}


@pytest.mark.parametrize(
    ("mirrors", "edit", "after"),
    [
        # Two archives behind one address find their way back.
        ((BOTH, {}), ("", ""), SOURCES),
        (
            (BOTH, {"http://a.example": "http://m.example"}),
            ("", ""),
            SOURCES.replace("http://a.example", "http://m.example"),
        ),
        (
            (BOTH, dict.fromkeys(BOTH, "http://n.example")),
            ("", ""),
            re.sub("(a|security).example", "n.example", SOURCES),
        ),
        # What somebody wrote since, or had there before, stays.
        (
            (BOTH, {}),
            ("m.example/ubuntu\nSuites: x\n", "m.example/own\nSuites: x\n"),
            SOURCES.replace("a.example/ubuntu", "m.example/own"),
        ),
        (({}, {}), ("a.example", "m.example"), SOURCES.replace("a.example", "m.example")),
    ],
)
def test_lines_of_a_mirror_that_leaves_become_what_they_were(
    run: Run, tmp_path: Path, mirrors: tuple[dict[str, str], dict[str, str]], edit: tuple[str, str], after: str
) -> None:
    first, second = mirrors
    path = tmp_path / "sources.list"
    path.write_text(SOURCES)
    run(apt_mirrors, {"mirrors": first, **places(tmp_path)})
    path.write_text(path.read_text().replace(*edit, 1))
    between = path.read_text()
    checked = run(apt_mirrors, {"mirrors": second, **places(tmp_path)}, check=True)
    assert path.read_text() == between
    done = run(apt_mirrors, {"mirrors": second, **places(tmp_path)})
    assert (checked["changed"], path.read_text()) == (done["changed"], after)
    again = run(apt_mirrors, {"mirrors": second, **places(tmp_path)})
    assert (again["changed"], path.read_text()) == (False, after)
    assert (tmp_path / "state" / "record.json").exists() is bool(second)


def test_sources_with_comments_of_another_encoding_keep_them(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "sources.list"
    before = b"# f\xfcr alle\r\ndeb http://a.example/debian x main\n"
    path.write_bytes(before)
    mirrors = {"http://a.example": "http://b.example"}
    assert run(apt_mirrors, {"mirrors": mirrors, **places(tmp_path)})["changed"] is True
    assert path.read_bytes() == before.replace(b"a.example", b"b.example")
    assert run(apt_mirrors, {"mirrors": mirrors, **places(tmp_path)})["changed"] is False
    run(apt_mirrors, {"mirrors": {}, **places(tmp_path)})
    assert path.read_bytes() == before


def test_the_file_of_another_role_is_left_to_it(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "sources.list.d" / "tpu_ops-deadsnakes.list"
    path.parent.mkdir()
    path.write_text("deb http://a.example/debian x main\n")
    assert (
        run(apt_mirrors, {"mirrors": {"http://a.example": "http://b.example"}, **places(tmp_path)})["changed"] is False
    )
    assert "a.example" in path.read_text()


def test_a_run_that_dies_between_two_files_of_sources_is_mended_by_the_next(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [tmp_path / "sources.list", tmp_path / "sources.list.d" / "d.list"]
    names[1].parent.mkdir()
    for path in names:
        path.write_text("deb http://a.example/debian x main\n")
    run(apt_mirrors, {"mirrors": {"http://a.example": "http://b.example"}, **places(tmp_path)})

    def dies(path: str, text: str) -> None:
        if path == str(names[1]):
            raise SystemExit(1)
        text_files.replace(path, text)

    monkeypatch.setattr(apt_mirrors, "replace", dies)
    with pytest.raises(ValueError, match="Expecting value"):
        run(apt_mirrors, {"mirrors": {"http://a.example": "http://c.example"}, **places(tmp_path)})
    monkeypatch.setattr(apt_mirrors, "replace", text_files.replace)
    run(apt_mirrors, {"mirrors": {}, **places(tmp_path)})
    assert [path.read_text() for path in names] == ["deb http://a.example/debian x main\n"] * 2


def test_the_diff_shows_no_login_of_a_mirror_and_the_file_has_it(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "sources.list"
    path.write_text("deb https://old:s3cret@a.example/debian x main\n# a mail@b.example, http://c.example/d@e\n")
    mirrors = {"https://old:s3cret@a.example": "https://ada:p@s3cret@m.example:1/a", "http://n.example": "http://o"}
    for check in (True, False):
        done = run(apt_mirrors, {"mirrors": mirrors, **places(tmp_path)}, check=check)
        assert "s3cret" not in str(done["diff"])
        (diff,) = done["diff"]
        rest = "# a mail@b.example, http://c.example/d@e\n"
        assert diff["before"] == f"deb https://***@a.example/debian x main\n{rest}"
        assert diff["after"] == f"deb https://***@m.example:1/a/debian x main\n{rest}"
    assert path.read_text().startswith("deb https://ada:p@s3cret@m.example:1/a/debian x main\n")
    run(apt_mirrors, {"mirrors": {}, **places(tmp_path)})
    assert path.read_text().startswith("deb https://old:s3cret@a.example/debian x main\n")


INDEX = [
    "Configure the package index",
    "Report why the package index could not be configured",
    "Show the package index without its password",
]


def index(folder: Path, address: str) -> dict[str, Any]:
    """Return the variables of a package index, its file in a folder and not where this machine has it."""
    own = {"owner": str(os.getuid()), "group": str(os.getgid())}
    named = yaml.safe_load((ROOT / "roles/base/vars/main.yml").read_text())
    files = [{"path": f"{folder}/etc", "content": "index-url = {{ base_pip_index_url }}\n", **own}]
    return {
        "base_pip_index_url": address,
        "__base_index_files": files,
        "__base_index_shown": named["__base_index_shown"],
    }


@pytest.mark.parametrize(
    ("address", "said", "mode"),
    [
        ("https://ada:s3cret@m.example/simple", "https://***@m.example/simple", []),
        ("https://s3cret@m.example/simple", "https://***@m.example/simple", ["--check"]),
        ("https://m.example/a@b/simple", "https://m.example/a@b/simple", []),
    ],
)
def test_the_package_index_is_shown_without_its_login_and_written_with_it(
    tmp_path: Path, address: str, said: str, mode: list[str]
) -> None:
    before = "index-url = https://old:s3cret@m.example/simple\n"
    (tmp_path / "etc").write_text(before)
    done = run_tasks(tmp_path, "base", INDEX, index(tmp_path, address), "--diff", "-vvv", *mode)
    assert (done.returncode, f"/etc/pip.conf, /etc/uv/uv.toml: {said}" in done.stdout) == (0, True), done.stdout
    printed = [line for line in (done.stdout + done.stderr).splitlines() if "s3cret" in line]
    assert printed == []
    assert (tmp_path / "etc").read_text() == (before if mode else f"index-url = {address}\n")


def test_why_the_package_index_could_not_be_named_is_said(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    done = run_tasks(tmp_path, "base", INDEX, index(tmp_path, "https://ada:s3cret@m.example"), "--diff")
    said = f"base_pip_index_url of pod-w0: {tmp_path}/etc: the path is a directory and not a file"
    assert (done.returncode, said in done.stdout) == (2, True), done.stdout
    assert "s3cret" not in done.stdout + done.stderr


def test_mirrors_are_set_once_in_all_files_of_sources(run: Run, tmp_path: Path) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text("deb http://a.example/debian x main\n")
    (tmp_path / "sources.list.d" / "d.sources").write_text("URIs: http://a.example/debian\n")
    (tmp_path / "sources.list.d" / "kept.save").write_text("deb http://a.example/debian x main\n")
    arguments = {"mirrors": {"http://a.example": "http://b.example"}, **places(tmp_path)}
    checked = run(apt_mirrors, arguments, check=True)
    assert "a.example" in (tmp_path / "sources.list").read_text()
    done = run(apt_mirrors, arguments)
    assert checked["files"] == done["files"] == [f"{tmp_path}/sources.list", f"{tmp_path}/sources.list.d/d.sources"]
    assert (tmp_path / "sources.list").read_text() == "deb http://b.example/debian x main\n"
    assert "a.example" in (tmp_path / "sources.list.d" / "kept.save").read_text()
    assert run(apt_mirrors, arguments)["changed"] is False


def test_the_kernel_s_answer_decides_whether_hugepages_changed(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "enabled"
    # A plain file keeps what is written and puts no brackets around it: a kernel that does not take the value.
    path.write_text("always [madvise] never\n")
    asked = {"value": "always", "path": str(path)}
    checked = run(hugepages, asked, check=True)
    assert (checked["changed"], checked["chosen"], checked["refused"]) == (True, "always", "")
    assert run(hugepages, asked | {"value": "madvise"})["changed"] is False
    written = run(hugepages, asked)
    assert path.read_text().startswith("always")
    assert (written["changed"], written["refused"]) == (False, f"{path}: the kernel keeps madvise")


def test_a_kernel_without_hugepages_is_reported_and_no_failure(run: Run, tmp_path: Path) -> None:
    for check in (True, False):
        result = run(hugepages, {"value": "always", "path": str(tmp_path / "none")}, check=check)
        assert (result["changed"], result.get("failed", False)) == (False, False)
        assert "No such file" in result["refused"]
        assert "transparent hugepages stay unknown" in str(result["warnings"])


@pytest.mark.parametrize(
    ("interrupted", "skip_done", "runs"), [(True, True, True), (False, True, False), (False, False, True)]
)
def test_dpkg_is_completed_before_installations_under_every_tag(interrupted: bool, skip_done: bool, runs: bool) -> None:
    tasks = DataLoader().load_from_file(str(ROOT / "roles/base/tasks/install.yml"), trusted_as_template=True)
    before, first = (
        next(at for at, task in enumerate(tasks) if module in task)
        for module in ("ansible.builtin.import_tasks", "apt_lists")
    )
    assert tasks[before]["ansible.builtin.import_tasks"] == "dpkg.yml"
    assert before < first
    assert tasks[before]["tags"] == tasks[first]["tags"]
    (task,) = DataLoader().load_from_file(str(ROOT / "roles/base/tasks/dpkg.yml"), trusted_as_template=True)
    variables = {"ansible_facts": {"worker": {"dpkg_interrupted": interrupted, "skip_done": skip_done}}}
    assert Templar(DataLoader(), variables).evaluate_conditional(task["when"]) is runs


@pytest.mark.parametrize(
    ("playbook", "module"),
    [
        ("python.yml", "ansible.builtin.import_role"),
        ("disks.yml", "ansible.builtin.import_role"),
        ("workspace.yml", "ansible.builtin.import_role"),
        ("upgrade.yml", "apt_lists"),
    ],
)
def test_playbooks_of_one_part_complete_the_work_of_dpkg_as_well(playbook: str, module: str) -> None:
    plays = yaml.safe_load((ROOT / "playbooks" / playbook).read_text())
    tasks = [inner for task in plays[-1]["tasks"] for inner in task.get("block", [task])]
    first = next(at for at, task in enumerate(tasks) if module in task)
    imported = tasks[first - 1]["ansible.builtin.import_tasks"]
    assert (ROOT / "playbooks" / imported).resolve() == ROOT / "roles/base/tasks/dpkg.yml"


LOCKED = "dpkg: error: dpkg frontend lock was locked by another process with pid 7"


@pytest.mark.parametrize(
    ("result", "failed", "changed"),
    [
        ({"changed": True, "rc": 0, "stderr": ""}, False, True),
        ({"changed": True, "rc": 2, "stderr": LOCKED}, False, False),
        ({"changed": True, "rc": 1, "stderr": "dpkg: error processing package"}, True, False),
        # There was nothing to complete, and check mode.
        ({"changed": False, "rc": 0, "stderr": ""}, False, False),
        ({"changed": True, "skipped": True}, False, True),
    ],
)
def test_an_installation_that_is_under_way_is_nobody_s_failure(
    result: dict[str, Any], failed: bool, changed: bool
) -> None:
    (task,) = DataLoader().load_from_file(str(ROOT / "roles/base/tasks/dpkg.yml"), trusted_as_template=True)
    templar = Templar(DataLoader(), {"__base_dpkg": result})
    found = [templar.evaluate_conditional(task[name]) for name in ("failed_when", "changed_when")]
    assert found == [failed, changed]


def task_of_install(name: str) -> dict[str, Any]:
    tasks = DataLoader().load_from_file(str(ROOT / "roles/base/tasks/install.yml"), trusted_as_template=True)
    (task,) = (task for task in tasks if task["name"] == name)
    return dict(task)


def holds(task: dict[str, Any], variables: dict[str, Any]) -> bool:
    conditions = task["when"] if isinstance(task["when"], list) else [task["when"]]
    templar = Templar(DataLoader(), variables)
    return all(templar.evaluate_conditional(condition) for condition in conditions)


@pytest.mark.parametrize(("known", "refreshed"), [({}, False), ({"changed": False}, False), ({"changed": True}, True)])
def test_package_lists_are_refreshed_after_a_change_of_mirrors(known: dict[str, bool], refreshed: bool) -> None:
    """`--tags shell` reads the package lists, and runs no other task of this role."""
    worker = {"apt_lists": {"filled": True, "age": 0}}
    variables: dict[str, Any] = {"ansible_facts": {"worker": worker}, "base_apt_cache_valid_time": 60}
    variables |= {"__base_mirrors": known} if known else {}
    variables |= {"__base_archive_stale": False, "ansible_check_mode": False}
    assert holds(task_of_install("Refresh the package lists"), variables) is refreshed


@pytest.mark.parametrize(
    ("stale", "check", "removed", "refreshed"),
    [
        (None, False, False, True),
        (False, True, False, True),
        (True, False, True, True),
        # Check mode leaves the archive, and it may be what apt cannot read.
        (True, True, True, False),
    ],
)
def test_an_archive_that_is_not_asked_for_goes_before_the_refresh(
    stale: bool | None, check: bool, removed: bool, refreshed: bool
) -> None:
    kept = DataLoader().load_from_file(str(ROOT / "roles/base/vars/main.yml"), trusted_as_template=True)
    variables = {"ansible_facts": {"worker": {"apt_lists": {"filled": False, "age": 0}}}, "ansible_check_mode": check}
    variables |= {"base_apt_cache_valid_time": 60, "__base_archive_stale": kept["__base_archive_stale"]}
    # Not every play has the role python.
    variables |= {} if stale is None else {"python_archive_stale": stale}
    names = ("Remove an archive that is not the one the fleet asks for", "Refresh the package lists")
    assert [holds(task_of_install(name), variables) for name in names] == [removed, refreshed]


AWAY = """\
W: Failed to fetch http://a.example/dists/x/InRelease  Could not connect to a.example:80, connection timed out
W: Some index files failed to download. They have been ignored, or old ones used instead.
"""
UNSIGNED = """\
W: GPG error: http://a.example/u x InRelease: The following signatures couldn't be verified: F2
E: The repository 'http://a.example/u x InRelease' is not signed.
N: Updating from such a repository can't be done securely, and is therefore disabled by default.
"""
ELSEWHERE = """\
W: http://a.example/u/dists/x/InRelease: Key is stored in legacy trusted.gpg keyring (/etc/apt/trusted.gpg)
W: Target Packages (main/binary-amd64/Packages) is configured multiple times in /etc/apt/sources.list:1 and :2
"""


@pytest.mark.parametrize(
    ("code", "said", "unread"),
    [
        (0, "", []),
        (0, ELSEWHERE, []),
        # What does not answer is none of apt's errors.
        (
            0,
            ELSEWHERE + AWAY,
            [
                "http://a.example/dists/x/InRelease Could not connect to a.example:80, connection timed out",
            ],
        ),
        (
            100,
            UNSIGNED,
            [
                "GPG error: http://a.example/u x InRelease: The following signatures couldn't be verified: F2",
                "The repository 'http://a.example/u x InRelease' is not signed",
            ],
        ),
        (
            100,
            "E: Failed to fetch file:/srv/none/./Packages  File not found\nE: Some index files failed to download. x\n",
            ["file:/srv/none/./Packages File not found"],
        ),
        # As apt 3 says it.
        (
            0,
            "W: Failed to fetch http://a.example/InRelease  Unable to connect to a.example:80:\n",
            ["http://a.example/InRelease Unable to connect to a.example:80"],
        ),
        (
            100,
            "E: Malformed entry 1 in list file /etc/apt/x.list\n",
            ["Malformed entry 1 in list file /etc/apt/x.list"],
        ),
        (137, "Killed\n", ["Killed"]),
        (137, "", ["apt-get update ended with 137 and said nothing"]),
    ],
)
def test_apt_names_the_sources_that_it_could_not_read(code: int, said: str, unread: list[str]) -> None:
    assert apt_lists.unread(code, said) == unread


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a function that gives this process an apt-get that says something, and returns the record of its calls."""

    def make(*answers: tuple[int, str]) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir()
        for at, (code, said) in enumerate(answers, 1):
            (folder / f"said{at}").write_text(said)
            (folder / f"code{at}").write_text(str(code))
        calls = folder / "calls"
        calls.touch()
        program = folder / "apt-get"
        program.write_text(
            f'#!/bin/sh\ncd {folder}\necho "$LC_ALL $*" >> calls\n'
            f"n=$(wc -l < calls)\n[ -e said$n ] || n={len(answers)}\ncat said$n >&2\nexit $(cat code$n)\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return calls

    return make


@pytest.mark.parametrize("required", [True, False])
def test_a_silent_source_stops_only_installations_and_is_named_with_a_fix(
    run: Run, tmp_path: Path, apt: Callable[..., Path], required: bool
) -> None:
    calls, stamp = apt((0, AWAY)), tmp_path / "stamp"
    stamp.touch()
    result = run(apt_lists, {"required": required, "stamp": str(stamp)})
    said = result["msg"] if required else str(result["warnings"])
    for words in (
        "http://a.example/dists/x/InRelease Could not connect",
        "run again",
        "base_apt_mirrors",
        "python_deadsnakes_url",
        "python_source: uv",
        "/etc/apt/sources.list.d",
    ):
        assert words in said
    assert (result.get("failed", False), result.get("changed", False)) == (required, False)
    # The next run tries again.
    assert not stamp.exists()
    # apt itself repeats what failed for a moment.
    assert calls.read_text() == "C -q -o Acquire::Retries=3 update\n"


def test_the_time_of_a_refresh_is_that_of_one_that_read_all_sources(
    run: Run, tmp_path: Path, apt: Callable[..., Path]
) -> None:
    calls, stamp = apt((0, ELSEWHERE)), tmp_path / "periodic" / "stamp"
    asked = {"required": True, "stamp": str(stamp)}
    assert run(apt_lists, asked, check=True)["changed"] is False
    assert (stamp.exists(), calls.read_text()) == (False, "")
    for _ in range(2):
        assert run(apt_lists, asked) | {"invocation": None} == {"changed": False, "unread": [], "invocation": None}
        assert stamp.stat().st_mtime > time.time() - 60
        assert stamp.stat().st_mode & 0o777 == 0o644
        os.utime(stamp, (0, 0))


LISTS_HELD = "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 7 (apt-get)\n"


@pytest.mark.parametrize(("timeout", "asked"), [(60, 2), (-1, 1)])
def test_another_refresh_is_waited_for_as_long_as_said(
    run: Run, tmp_path: Path, apt: Callable[..., Path], timeout: int, asked: int
) -> None:
    calls = apt((100, LISTS_HELD), (0, ""))
    result = run(apt_lists, {"required": False, "stamp": str(tmp_path / "stamp"), "lock_timeout": timeout})
    assert len(calls.read_text().splitlines()) == asked
    if timeout < 0:
        # As the module apt begins, which the command line knows.
        assert result["msg"].startswith("Failed to lock apt: Could not get lock /var/lib/apt/lists/lock.")
    assert result.get("failed", False) is (timeout < 0)


@pytest.mark.parametrize(
    ("packages", "fault", "uris", "needed", "archive"),
    [
        ([], AWAY, "", False, "http://c.example/u"),
        (
            ["htop"],
            UNSIGNED,
            "'http://b.example/u/pool/h/htop_1.deb' htop_1.deb 1 SHA256:0\n",
            False,
            "http://c.example/u",
        ),
        # It is to come from there.
        (["htop"], UNSIGNED, "'http://b.example/h.deb' h.deb 1\n", True, "http://a.example/u"),
        # What it depends on comes from there.
        (["htop"], UNSIGNED, "'http://b.example/h.deb' h.deb 1 \n'http://a.example/pool/l.deb' l.deb 1 \n", True, ""),
        (["htop"], UNSIGNED, "'http://me:secret@a.example/h.deb' h.deb 1\n", True, ""),
        (["htop"], "E: Failed to fetch file:/srv/none/./Packages  x\n", "'file:/srv/here/h.deb' h.deb 1\n", True, ""),
        # There may be a package of that name in the source.
        (["htop"], UNSIGNED, None, True, ""),
        # apt names no source.
        (
            ["htop"],
            "E: Malformed entry 1 in list file /etc/apt/x.list\n",
            "'http://b.example/h.deb' h.deb 1\n",
            True,
            "",
        ),
    ],
)
def test_a_source_that_nothing_to_install_comes_from_may_be_unread(
    run: Run,
    tmp_path: Path,
    apt: Callable[..., Path],
    *,
    packages: list[str],
    fault: str,
    uris: str | None,
    needed: bool,
    archive: str,
) -> None:
    calls = apt((100, fault), (100, "") if uris is None else (0, uris))
    program = calls.parent / "apt-get"
    program.write_text(program.read_text().replace("cat said$n >&2", "cat said$n; cat said$n >&2"))
    result = run(apt_lists, {"packages": packages, "archive": archive, "stamp": str(tmp_path / "stamp")})
    assert (result.get("failed", False), "warnings" in result) == (needed, not needed)
    asked = [line for line in calls.read_text().splitlines() if line.endswith("install -- htop")]
    assert len(asked) == (bool(packages) and "Malformed" not in fault)


def test_a_refresh_has_to_read_the_sources_that_missing_packages_come_from() -> None:
    task = task_of_install("Refresh the package lists")
    templar = Templar(DataLoader(), {"__base_install": ["htop"]})
    assert templar.template(task["apt_lists"]["packages"]) == ["htop"]
    assert task["check_mode"] is False


@pytest.fixture
def warned(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Return a function that points the sources in a folder to mirrors, and returns what it was warned of."""

    def call(mirrors: dict[str, str], *, check: bool = False) -> list[str]:
        monkeypatch.setattr("ansible.module_utils.common.warnings._global_warnings", {})
        result = run(apt_mirrors, {"mirrors": mirrors, **places(tmp_path)}, check=check)
        return [warning["event"]["msg"] for warning in result.get("warnings", [])]

    return call


REGIONAL = "http://europe-west4.gce.archive.ubuntu.com/ubuntu"


def test_a_mirror_without_a_source_warns_with_the_present_addresses(
    warned: Callable[..., list[str]], tmp_path: Path
) -> None:
    (tmp_path / "sources.list").write_text(
        "# deb http://archive.ubuntu.com/ubuntu jammy main\n"
        f"deb [arch=amd64] {REGIONAL}/ jammy main\n"
        "deb https://ada:s3cret@a.example/debian x main\n"
    )
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d" / "x.sources").write_text(SOURCES)
    (tmp_path / "sources.list.d" / "tpu_ops-deadsnakes.list").write_text("deb http://own.example/ x main\n")
    mirrors = {"http://ada:s3cret@archive.ubuntu.com/ubuntu": "http://m.example", REGIONAL: "http://m.example"}
    there = f"http://a.example/ubuntu, {REGIONAL}/, http://security.example/ubuntu, https://***@a.example/debian"
    said = (
        "base_apt_mirrors: no source here has the address http://***@archive.ubuntu.com/ubuntu; the sources are:"
        f" {there}"
    )
    # Also after the other one was replaced: these are the addresses by which a mirror is named.
    for check in (True, False, False):
        assert warned(mirrors, check=check) == [said]


def test_a_worker_without_sources_has_none_for_a_mirror(warned: Callable[..., list[str]]) -> None:
    said = "base_apt_mirrors: no source here has the address http://b.example; the sources are: none"
    assert warned({"http://b.example": "http://m.example"}) == [said]


def test_a_mirror_that_was_set_earlier_or_is_used_in_part_gives_no_warning(
    warned: Callable[..., list[str]], tmp_path: Path
) -> None:
    (tmp_path / "sources.list").write_text(f"deb {REGIONAL}/ jammy main\n")
    mirrors: list[dict[str, str]] = [
        {REGIONAL: "http://m.example"},
        {REGIONAL: "http://m.example"},
        {f"{REGIONAL}/": "http://n.example"},
        # The shorter one is used for nothing here.
        {"http://europe-west4.gce.archive.ubuntu.com": "http://n.example", REGIONAL: "http://m.example"},
        {},
    ]
    assert [warned(each) for each in mirrors] == [[]] * len(mirrors)


@pytest.mark.parametrize("there", [True, False])
def test_lists_are_not_those_of_mirrors_that_changed(run: Run, tmp_path: Path, there: bool) -> None:
    """This holds even if the run does not get to refresh them."""
    stamp = tmp_path / "stamp"
    (tmp_path / "sources.list").write_text("deb http://a.example/debian x main\n")
    arguments = {"mirrors": {"http://a.example": "http://b.example"}, "stamp": str(stamp), **places(tmp_path)}
    if there:
        stamp.touch()
    run(apt_mirrors, arguments, check=True)
    assert stamp.exists() is there
    assert run(apt_mirrors, arguments)["changed"] is True
    assert not stamp.exists()
    stamp.touch()
    run(apt_mirrors, arguments)
    assert stamp.exists()


HANDLERS = DataLoader().load_from_file(str(ROOT / "roles/base/handlers/main.yml"), trusted_as_template=True)
RUNNING, COMING = {"enabled": "enabled", "active": "active"}, {"enabled": "", "active": ""}
LOGS = "/etc/tmpfiles.d/tpu_ops-logs.conf"
NTP, CHRONY = "/etc/systemd/timesyncd.conf.d/zz-tpu_ops.conf", "/etc/chrony/sources.d/tpu_ops.sources"


@pytest.mark.parametrize(
    ("path", "clock_unit", "check", "handlers"),
    [
        ("/etc/pip.conf", RUNNING, False, []),
        ("/etc/localtime", RUNNING, False, []),
        ("/etc/systemd/journald.conf.d/zz-tpu_ops.conf", RUNNING, False, ["Restart systemd-journald"]),
        ("/etc/systemd/system/logrotate.timer.d/tpu_ops.conf", RUNNING, False, ["Read the units again"]),
        (LOGS, RUNNING, False, ["Open the directory of libtpu's logs to all users"]),
        (NTP, RUNNING, False, ["Restart systemd-timesyncd"]),
        (NTP, COMING, False, ["Restart systemd-timesyncd"]),
        (NTP, COMING, True, []),
        (NTP, {"enabled": "enabled", "active": "skipped"}, False, []),
        (NTP, {"enabled": "masked", "active": "inactive"}, False, []),
        (CHRONY, RUNNING, False, ["Restart chrony"]),
        (CHRONY, {"enabled": "enabled", "active": "skipped"}, False, []),
    ],
)
def test_only_what_reads_a_changed_file_is_restarted(
    path: str, clock_unit: dict[str, str], check: bool, handlers: list[str]
) -> None:
    variables: dict[str, Any] = {
        "__base_written": {"changed_paths": [path]},
        "__base_behind": [],
        "__base_clock": {"package": "chrony" if "chrony" in path else "systemd-timesyncd"},
        "__base_clock_unit": clock_unit,
        "base_time_sync": True,
        "ansible_check_mode": check,
    }
    templar = Templar(DataLoader(), variables)

    def runs(handler: dict[str, Any]) -> bool:
        conditions = handler.get("when", [])
        conditions = conditions if isinstance(conditions, list) else [conditions]
        return all(templar.evaluate_conditional(condition) for condition in conditions)

    assert [handler["name"] for handler in HANDLERS if runs(handler)] == handlers


def test_libtpu_s_logs_are_open_to_all_users_and_removed_after_a_while(tmp_path: Path) -> None:
    variables = DataLoader().load_from_file(str(ROOT / "roles/base/vars/main.yml"), trusted_as_template=True)
    written = next(entry["content"] for entry in variables["__base_files"] if entry["path"] == LOGS)
    line = Templar(DataLoader(), variables).template(written)
    logs = tmp_path / "tmp" / "tpu_logs"
    logs.mkdir(parents=True, mode=0o700)
    (logs / "tpu_driver.INFO").touch()

    def tmpfiles(age: str) -> None:
        # In this test, the directory belongs to the user of the test.
        own = line.replace(" root root 10d", f" {os.getuid()} {os.getgid()} {age}")
        assert own != line
        (tmp_path / "logs.conf").write_text(own)
        command = ["systemd-tmpfiles", f"--root={tmp_path}", "--create", "--clean", str(tmp_path / "logs.conf")]
        subprocess.run(command, check=True, timeout=30)

    tmpfiles("10d")
    assert logs.stat().st_mode & 0o7777 == 0o1777
    assert [path.name for path in logs.iterdir()] == ["tpu_driver.INFO"]
    tmpfiles("0")
    assert list(logs.iterdir()) == []
