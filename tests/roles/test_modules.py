from __future__ import annotations

import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.basic import AnsibleModule

from roles.base.library import ca_certificates
from roles.base.library.ca_certificates import split_pem
from roles.tcmalloc.library import preload_entries
from roles.tcmalloc.library.preload_entries import strip

Run = Callable[..., dict[str, Any]]
TCMALLOC = "/usr/lib/x86_64-linux-gnu/libtcmalloc.so.4"


@pytest.mark.parametrize(
    ("path", "before", "after"),
    [
        ("/etc/environment", f"PATH=/bin\nLD_PRELOAD={TCMALLOC}\nLANG=C\n", "PATH=/bin\nLANG=C\n"),
        ("/etc/environment", f'LD_PRELOAD="{TCMALLOC}"\n', ""),
        ("/etc/environment", f"LD_PRELOAD={TCMALLOC}:/opt/other.so\n", "LD_PRELOAD=/opt/other.so\n"),
        ("/etc/environment", f'LD_PRELOAD="/opt/a.so {TCMALLOC} /opt/b.so"\n', 'LD_PRELOAD="/opt/a.so /opt/b.so"\n'),
        ("/etc/environment", f"MY_LD_PRELOAD={TCMALLOC}\n", f"MY_LD_PRELOAD={TCMALLOC}\n"),
        ("/etc/environment", f"NOTE={TCMALLOC}\n", f"NOTE={TCMALLOC}\n"),
        ("/etc/environment", f"# LD_PRELOAD={TCMALLOC}\n", f"# LD_PRELOAD={TCMALLOC}\n"),
        ("/etc/environment", f"LD_PRELOAD={TCMALLOC}", ""),
        ("/etc/environment.d/10-tpu.conf", "LD_PRELOAD=/usr/local/lib/libtcmalloc_minimal.so.4\n", ""),
        ("/etc/profile.d/tpu.sh", f"export LD_PRELOAD={TCMALLOC}\nexport A=1\n", "export A=1\n"),
        (
            "/etc/profile.d/tpu.sh",
            f"export LD_PRELOAD='{TCMALLOC}'; export A=1\n",
            "export LD_PRELOAD=''; export A=1\n",
        ),
        ("/etc/profile.d/tpu.sh", f"LD_PRELOAD={TCMALLOC}; export LD_PRELOAD\n", ""),
        ("/etc/profile.d/tpu.sh", f"LD_PRELOAD=$LD_PRELOAD:{TCMALLOC}\n", "LD_PRELOAD=$LD_PRELOAD\n"),
        (
            "/etc/profile.d/tpu.sh",
            f"if [ -e {TCMALLOC} ]; then\n  export LD_PRELOAD={TCMALLOC}\nfi\n",
            f"if [ -e {TCMALLOC} ]; then\n  :\nfi\n",
        ),
        (
            "/etc/bash.bashrc",
            f"if true; then\nexport LD_PRELOAD={TCMALLOC}\nfi\n",
            "if true; then\n:\nfi\n",
        ),
        (
            "/etc/bash.bashrc",
            f"[ -e {TCMALLOC} ] && export LD_PRELOAD={TCMALLOC}\n",
            f"[ -e {TCMALLOC} ] && export LD_PRELOAD=\n",
        ),
        *(
            ("/etc/profile.d/tpu.sh", f"export LD_PRELOAD={before}\nA=1\n", f"{after}A=1\n")
            for before, after in [
                (f"${{LD_PRELOAD:+$LD_PRELOAD:}}{TCMALLOC}", "export LD_PRELOAD=${LD_PRELOAD:+$LD_PRELOAD:}\n"),
                (f'"{TCMALLOC}${{LD_PRELOAD:+:$LD_PRELOAD}}"', 'export LD_PRELOAD="${LD_PRELOAD:+:$LD_PRELOAD}"\n'),
                ('"$(find /usr/lib -name libtcmalloc.so.4)"', ""),
                ("`find /usr/lib -name libtcmalloc.so.4`:/opt/b.so", "export LD_PRELOAD=/opt/b.so\n"),
                ("$(find /usr/lib -name libtcmalloc.so.4)", ""),
                ("/usr/lib/$(uname -m)-linux-gnu/libtcmalloc.so.4", ""),
                ("/usr/lib/${ARCH}-linux-gnu/libtcmalloc.so.4:$OTHER", "export LD_PRELOAD=$OTHER\n"),
                ("${OTHER:-/opt/b.so}", "export LD_PRELOAD=${OTHER:-/opt/b.so}\n"),
            ]
        ),
        *(
            ("/etc/profile.d/tpu.sh", f"{before}export LD_PRELOAD={TCMALLOC}\n{behind}", f"{before}:\n{behind}")
            for before, behind in [
                ("if true; then\n# faster\n\n", "fi\n"),
                ("[ -e /x ] || \\\n", "umask 077\n"),
                ("[ -e /x ] &&\n", "umask 077\n"),
                ("case $A in a)\n", ";; esac\n"),
            ]
        ),
        ("/etc/security/pam_env.conf", f"LD_PRELOAD DEFAULT={TCMALLOC}\nA DEFAULT=1\n", "A DEFAULT=1\n"),
        (
            "/etc/security/pam_env.conf",
            f'LD_PRELOAD\tDEFAULT="{TCMALLOC} /opt/b.so"\n',
            'LD_PRELOAD\tDEFAULT="/opt/b.so"\n',
        ),
        ("/etc/security/pam_env.conf", f"OTHER DEFAULT={TCMALLOC}\n", f"OTHER DEFAULT={TCMALLOC}\n"),
        ("/etc/ld.so.preload", f"{TCMALLOC}\n/opt/b.so\n", "/opt/b.so\n"),
        ("/etc/ld.so.preload", f"/opt/a.so:{TCMALLOC} /opt/b.so\n", "/opt/a.so:/opt/b.so\n"),
        ("/etc/ld.so.preload", f"{TCMALLOC} # why\n", "# why\n"),
    ],
)
def test_exactly_the_entry_of_tcmalloc_goes(path: str, before: str, after: str) -> None:
    assert strip(path, before, "libtcmalloc") == after
    assert strip(path, after, "libtcmalloc") == after
    if path.endswith((".sh", ".bashrc")):
        subprocess.run(["bash", "-n"], input=after, text=True, check=True, timeout=10)


def test_preload_entries_keeps_mode_and_reports_without_changing_in_check_mode(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "environment"
    path.write_text(f"A=1\nLD_PRELOAD={TCMALLOC}\n")
    path.chmod(0o640)
    arguments = {"files": [str(tmp_path / "env*"), str(tmp_path / "none")], "library": "libtcmalloc"}
    checked = run(preload_entries, arguments, check=True)
    assert (checked["changed"], checked["files"]) == (True, [str(path)])
    assert "LD_PRELOAD" in path.read_text()
    assert run(preload_entries, arguments)["changed"] is True
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("A=1\n", 0o640)
    assert run(preload_entries, arguments)["changed"] is False


def test_the_diff_shows_no_line_beside_the_changed_one(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "environment"
    path.write_text(f"HF_TOKEN=sekret\nLD_PRELOAD={TCMALLOC}\nWANDB_API_KEY=sekret")
    arguments = {"files": [str(path)], "library": "libtcmalloc"}
    for check in (True, False):
        (diff,) = run(preload_entries, arguments, check=check)["diff"]
        assert (diff["before"], diff["after"]) == (f"LD_PRELOAD={TCMALLOC}\n", "")
    assert path.read_text() == "HF_TOKEN=sekret\nWANDB_API_KEY=sekret"


def test_a_file_that_a_shell_could_not_read_any_more_stays(run: Run, tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "tpu.sh"
    path.write_text(f"export LD_PRELOAD={TCMALLOC}\n")
    monkeypatch.setattr(preload_entries, "strip", lambda *_: "if\n")
    answer = run(preload_entries, {"files": [str(path)], "library": "libtcmalloc"})
    assert f"{path}: /bin/sh could no longer read it" in answer["msg"]
    assert path.read_text() == f"export LD_PRELOAD={TCMALLOC}\n"


@pytest.mark.parametrize("value", [f'"$X"{TCMALLOC}', f'"${{LD_PRELOAD:-{TCMALLOC}}}"', f"${{X:+$X:{TCMALLOC}}}"])
def test_an_ld_preload_line_that_is_not_understood_is_named(run: Run, tmp_path: Path, value: str) -> None:
    path = tmp_path / "tpu.sh"
    path.write_text(f"A=1\nexport LD_PRELOAD={value}\n")
    answer = run(preload_entries, {"files": [str(path)], "library": "libtcmalloc"})
    assert f"{path}, line 2: libtcmalloc is used there in a way that is not understood" in str(answer["warnings"])


def certificate(seed: int) -> str:
    """Return something in the form of a certificate; the store does not look inside."""
    return ssl.DER_cert_to_PEM_cert(bytes([48, seed]) * 40)


def test_a_bundle_is_split_into_its_certificates() -> None:
    text = f"# one\n{certificate(1)}\n# two\r\n{certificate(2)}".replace("\n", "\r\n")
    assert sorted(split_pem(text).values()) == sorted([certificate(1), certificate(2)])
    with pytest.raises(ValueError, match="no certificate"):
        split_pem("nothing here")


def test_certificates_of_the_system_need_no_file_and_unlisted_ones_go(run: Run, tmp_path: Path) -> None:
    directory, bundle = tmp_path / "ours", tmp_path / "bundle.crt"
    directory.mkdir()
    (directory / "left.crt").write_text(certificate(9))
    bundle.write_text(certificate(1) + certificate(9))
    arguments = {"certificates": [certificate(1) + certificate(2)], "directory": str(directory), "bundle": str(bundle)}
    result = run(ca_certificates, arguments, check=True)
    assert result["changed"] is True
    assert (len(result["added"]), result["removed"]) == (1, ["left.crt"])
    assert [path.name for path in directory.iterdir()] == ["left.crt"]


def test_a_bundle_that_an_interrupted_run_left_stale_is_noticed(run: Run, tmp_path: Path) -> None:
    directory, bundle = tmp_path / "ours", tmp_path / "bundle.crt"
    directory.mkdir()
    bundle.write_text(certificate(1))
    arguments = {"certificates": [certificate(2)], "directory": str(directory), "bundle": str(bundle)}
    name = run(ca_certificates, arguments, check=True)["added"][0]
    (directory / name).write_text(certificate(2))
    stale = run(ca_certificates, arguments, check=True)
    assert (stale["changed"], stale["added"]) == (True, [])
    bundle.write_text(certificate(1) + certificate(2))
    assert run(ca_certificates, arguments, check=True)["changed"] is False


def test_a_removed_certificate_is_remembered_until_the_bundle_lacks_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, bundle, tool = tmp_path / "ours", tmp_path / "bundle.crt", tmp_path / "update-ca-certificates"
    directory.mkdir()
    (directory / "left.crt").write_text(certificate(9))
    bundle.write_text(certificate(9))
    # This machine's own tool would write this machine's own bundle.
    monkeypatch.setattr(AnsibleModule, "get_bin_path", lambda *_, **__: str(tool))
    arguments = {"certificates": [], "directory": str(directory), "bundle": str(bundle)}
    for command in ("exit 1", f"cat {directory}/*.crt > {bundle} 2>/dev/null || true"):
        tool.write_text(f"#!/bin/sh\n{command}\n")
        tool.chmod(0o755)
        result = run(ca_certificates, arguments)
        assert result["failed" if command == "exit 1" else "changed"] is True
    assert (bundle.read_text(), list(directory.iterdir())) == ("", [])
    assert run(ca_certificates, arguments)["changed"] is False
