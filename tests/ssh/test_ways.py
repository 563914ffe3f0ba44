"""Address, proxy and control socket of each worker."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.nodes import node
from tpu_ops.cloud.node import workers_of
from tpu_ops.config import Settings
from tpu_ops.fleet import selection
from tpu_ops.fleet.state import Files
from tpu_ops.ssh import client_config, openssh
from tpu_ops.ssh import ways as ways_module
from tpu_ops.ssh.ways import Ways

MUX = Path("/run/user/7/tpu_ops/mux")
SETTINGS = Settings(
    path=Path("/fleet"),
    file=Path("/fleet/inventory/tpu_vm.yml"),
    projects=("lab",),
    zones=(),
    endpoint="",
    request_timeout=60,
    states=("READY",),
    connect_with=("external", "internal"),
    user="ada",
    private_key=None,
    state_dir=Path("/state"),
)

#: A single host with both addresses, a pod with internal ones only, and a node without any.
WORKERS = workers_of(
    [
        node("gate", node_id="1", count=1),
        node("inner", node_id="2", external_ips=(), instance_names=("t1v-n-abc-w-0", "")),
        node("lost", node_id="3", count=1, external_ips=("",), internal_ips=("",)),
    ]
)
GATE, INNER, INNER_1, LOST = WORKERS


def ways(folder: Path = Path("/state"), workers=WORKERS, **options) -> Ways:
    settings = SETTINGS._replace(**options)
    return Ways(settings, Files(folder), MUX, workers)


@pytest.mark.parametrize(
    ("connect_with", "address"),
    [(("external",), "34.0.1.0"), (("internal", "external"), "10.0.1.0"), (("external", "internal"), "34.0.1.0")],
)
def test_the_preferred_address_is_taken(connect_with, address):
    assert ways(connect_with=connect_with).of(GATE).address == address


def test_the_other_address_is_taken_where_the_preferred_is_missing():
    assert ways().of(INNER).address == "10.0.2.0"
    assert ways(connect_with=("external",)).of(INNER).problem == "has no external address"
    assert ways().of(LOST).problem == "has no external or internal address"


#: Settings, and which of the four workers are reached through a proxy, and which cannot be reached.
WAYS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "directly": ({}, [], ["lost-w0"]),
    "through a worker": ({"proxy_jump": "gate-w0"}, ["inner-w0", "inner-w1"], ["lost-w0"]),
    "through a host": ({"proxy_jump": "eve@bastion"}, ["inner-w0", "inner-w1"], ["lost-w0"]),
    "through a worker, by internal addresses": (
        {"proxy_jump": "gate-w0", "connect_with": ("internal",)},
        ["inner-w0", "inner-w1"],
        ["lost-w0"],
    ),
    "through a host, by internal addresses": (
        {"proxy_jump": "bastion", "connect_with": ("internal", "external")},
        ["gate-w0", "inner-w0", "inner-w1"],
        ["lost-w0"],
    ),
    "through a worker that has no external address": (
        {"proxy_jump": "inner-w1"},
        [],
        ["inner-w0", "inner-w1", "lost-w0"],
    ),
    "through IAP": ({"iap": True}, ["inner-w0"], ["inner-w1", "lost-w0"]),
    "external addresses only": (
        {"proxy_jump": "gate-w0", "connect_with": ("external",)},
        [],
        ["inner-w0", "inner-w1", "lost-w0"],
    ),
}


@pytest.mark.parametrize("what", WAYS)
def test_a_proxy_is_taken_where_the_external_address_is_not_to_be_had(what):
    options, proxied, unreachable = WAYS[what]
    found = {worker.host: ways(**options).of(worker) for worker in WORKERS}
    assert [host for host, way in found.items() if way.proxy] == proxied
    assert [host for host, way in found.items() if way.problem] == unreachable
    assert all(bool(way.address) != bool(way.problem) for way in found.values())
    assert ways(**options).proxies == bool(options.get("proxy_jump") or options.get("iap"))
    assert (found["gate-w0"].address == "34.0.1.0") == ("gate-w0" not in proxied)


def test_another_way_or_key_never_takes_a_connection_that_was_opened_before():
    others: tuple[dict[str, Any], ...] = ({}, {"proxy_jump": "gate-w0"}, {"proxy_jump": "bastion"}, {"iap": True})
    inner = [ways(**options).of(INNER).control for options in others]
    assert len(set(inner)) == len(others)
    assert ways(proxy_jump="bastion").of(INNER).control == inner[2]
    # Who is reached directly is so whatever the others' proxy.
    assert len({ways(**options).of(GATE).control for options in others}) == 1
    assert ways(private_key=Path("/other")).of(INNER).control not in inner


def test_a_jump_that_does_not_serve_is_no_way_to_those_behind_it():
    away = [
        worker._replace(node=worker.node._replace(state="PREEMPTED")) if worker is GATE else worker
        for worker in WORKERS
    ]
    found = ways(proxy_jump="gate-w0", workers=away)
    (said,) = ways_module.problems((worker, found.of(worker)) for worker in (INNER, INNER_1))
    why = "is to be reached through gate-w0 (proxy_jump), whose node is PREEMPTED"
    assert said == f"2 workers cannot be reached, each {why}: inner-w[0-1]"
    assert ways_module.host_name(INNER, found.of(INNER)) == "inner-w0.has-no-address.invalid"
    through = ways(proxy_jump="lost-w0").of(INNER)
    assert through.problem == "is to be reached through lost-w0 (proxy_jump), which has no external address"
    assert ways(proxy_jump="lost-w0").of(GATE).address == "34.0.1.0"


#: proxy_jump, whether it is a worker, and what ssh is called with behind -F FILE.
JUMPS = {
    "gate-w0": (True, "-W [10.0.2.0]:22 gate-w0"),
    "eve@gate-w0": (True, "-l eve -W [10.0.2.0]:22 gate-w0"),
    "gate-w0:2222": (True, "-p 2222 -W [10.0.2.0]:22 gate-w0"),
    "bastion": (False, "-W [10.0.2.0]:22 bastion"),
    "eve@bastion.example.org:2222": (False, "-l eve -p 2222 -W [10.0.2.0]:22 bastion.example.org"),
    "gate": (True, "-W [10.0.2.0]:22 gate-w0"),
    "gate-w1": (False, "-W [10.0.2.0]:22 gate-w1"),
    "[2001:db8::1]": (False, "-W [10.0.2.0]:22 2001:db8::1"),
    "eve@[2001:db8::1]:22": (False, "-l eve -p 22 -W [10.0.2.0]:22 2001:db8::1"),
}


ODD = [(jump, folder) for jump in ("gate-w0", "bastion") for folder in ("a b", "100%h", "it's")]


@pytest.mark.parametrize(("jump", "folder"), [*((jump, "state") for jump in JUMPS), *ODD])
def test_ssh_calls_the_jump_with_these_words(jump, folder, tmp_path, monkeypatch):
    """The real ssh runs the ProxyCommand, for the config and for Ansible's arguments alike; it finds a stand-in."""
    own, wanted = JUMPS[jump]
    state, notes = tmp_path / folder, tmp_path / "notes"
    (tmp_path / "bin").mkdir()
    state.mkdir()
    stand_in = tmp_path / "bin" / "ssh"
    stand_in.write_text(f'#!/bin/sh\nprintf "%s\\n" "$2" >>{notes}\nshift 2\necho "$*" >>{notes}\n')
    stand_in.chmod(0o755)
    monkeypatch.setenv("SHELL", "/bin/sh")
    found = ways(state, proxy_jump=jump)
    text = client_config.ssh_config([(INNER, found.of(INNER))], user="ada", private_key=None, options=(), mux=tmp_path)
    (state / "ssh_config").write_text(text)
    arguments = client_config.arguments(client_config.own_options(INNER, found.of(INNER)))
    for words in (shlex.join(["-F", str(state / "ssh_config"), "inner-w0"]), f"-F none {arguments} 10.0.2.0"):
        subprocess.run(
            ["/bin/sh", "-c", f"exec {shutil.which('ssh')} -o BatchMode=yes -o ControlPath=none {words}"],
            env={**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
            capture_output=True,
            check=False,
        )
    file = state / ("ssh_config" if own else "jump_config")
    assert notes.read_text().splitlines() == [str(file), wanted] * 2
    assert bool(found.jump_config) != own
    # What is done to the connection to it is done to that very connection.
    assert found.lead
    assert (found.lead.ssh_config, shlex.join([*found.lead.options, "-W"])) == (file, wanted.split(" [")[0])
    assert wanted.endswith(f" {found.lead.name}")


def test_the_words_for_gcloud_name_instance_zone_and_project():
    way = ways(iap=True).of(INNER)
    tunnel = "gcloud compute start-iap-tunnel t1v-n-abc-w-0 %p --listen-on-stdin --project=lab --zone=us-central2-b"
    assert way.proxy == f"{tunnel} --verbosity=error"
    options = dict(client_config.own_options(INNER, way))
    assert int(options["ConnectTimeout"]) > int(dict(client_config.common_options(Path("k")))["ConnectTimeout"])


@pytest.mark.gcloud
def test_gcloud_takes_these_words(tmp_path):
    """Without credentials, gcloud stops at the login; it rejects unknown arguments before that."""
    command = ways(iap=True).of(INNER).proxy.replace("%p", "22").split()
    said = {}
    for word in ("--quiet", "--no-such-option"):
        done = subprocess.run(
            [*command, word],
            env={**os.environ, "CLOUDSDK_CONFIG": str(tmp_path), "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "0"},
            input="",
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode
        said[word] = done.stderr
    assert "unrecognized arguments: --no-such-option" in said["--no-such-option"]
    assert "active account" in said["--quiet"]


def test_workers_with_one_address_behind_a_jump_have_separate_sockets():
    """Private addresses are those of a network, and a jump of another network leads to another machine."""
    twins = workers_of(
        [
            node("twin", project="one", node_id="5", count=1, external_ips=(), internal_ips=("10.0.0.9",)),
            node("twin", project="two", node_id="6", count=1, external_ips=(), internal_ips=("10.0.0.9",)),
        ]
    )
    found = ways(workers=twins, proxy_jump="bastion")
    one, two = (found.of(worker) for worker in twins)
    assert one.address == two.address
    assert one.control != two.control
    sockets = set()
    for worker, way in zip(twins, (one, two), strict=True):
        arguments = [word for key, value in client_config.own_options(worker, way) for word in ("-o", f"{key}={value}")]
        command = ["ssh", "-F", "none", *arguments, "-G", way.address]
        seen = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        sockets.add(next(line for line in seen.splitlines() if line.startswith("controlpath")))
    assert len(sockets) == 2
    assert all(len(line.rpartition("/")[2]) == ways_module.CONTROL_NAME for line in sockets)


def test_ssh_and_ansible_offer_all_keys_in_the_same_order(tmp_path):
    keys = [tmp_path / name for name in ("id_ed25519", "google compute 100%", "id_rsa")]
    settings = SETTINGS._replace(state_dir=tmp_path, private_key=keys[0], more_keys=tuple(keys[1:]))
    options = selection.ssh_options(settings)
    way = Ways(settings, Files(tmp_path), tmp_path, WORKERS).of(GATE)
    text = client_config.ssh_config([(GATE, way)], user="ada", private_key=keys[0], options=options, mux=tmp_path)
    (tmp_path / "config").write_text(text)
    # As Ansible names the one of its own.
    ansible = f"-F none -o 'IdentityFile=\"{keys[0]}\"' {client_config.arguments(options)} -G {way.address}"
    for words in (f"-F {tmp_path}/config -G {GATE.host}", ansible):
        seen = subprocess.run(["sh", "-c", f"ssh {words}"], capture_output=True, text=True, check=True).stdout
        offered = [line.partition(" ")[2].replace("%%", "%") for line in seen.splitlines() if "identityfile" in line]
        assert offered == [str(path) for path in keys], words


def made_of(words: str) -> list[str]:
    """Return what ssh makes of its arguments."""
    return subprocess.run(["sh", "-c", f"ssh {words}"], capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize(("named", "only"), [(True, "yes"), (False, "no")])
def test_a_named_key_is_the_only_one_offered_except_to_an_own_jump(tmp_path, monkeypatch, named, only):
    monkeypatch.setattr(openssh, "home", lambda: tmp_path)
    key = tmp_path / "id"
    settings = SETTINGS._replace(state_dir=tmp_path, private_key=key, only_key=named, proxy_jump="bastion")
    nodes = {worker.node.full_name: worker.node for worker in WORKERS}
    texts = dict(selection.ssh_configs(settings, list(nodes.values())))
    for path, text in texts.items():
        path.write_text(text)
    files = Files(tmp_path)
    ansible = f"-F none -o IdentityFile={key} {client_config.arguments(selection.ssh_options(settings))} -G 192.0.2.1"
    for words in (f"-F {files.ssh_config()} -G {INNER.host}", ansible):
        assert {f"identitiesonly {only}", f"identityfile {key}"} <= set(made_of(words)), words
    for config in (files.jump_config, files.ssh_config()):
        assert "identitiesonly no" in made_of(f"-F {config} -G bastion"), config


@pytest.mark.parametrize("forward", [False, True])
def test_forward_agent_for_all_hosts_in_the_users_config_is_ignored(tmp_path, monkeypatch, forward):
    """It stands below the line that includes ours."""
    monkeypatch.setattr(openssh, "home", lambda: tmp_path)
    settings = SETTINGS._replace(state_dir=tmp_path, forward_agent=forward)
    text = client_config.ssh_config(
        [(GATE, Ways(settings, Files(tmp_path), tmp_path, WORKERS).of(GATE))],
        user="ada",
        private_key=None,
        options=selection.ssh_options(settings),
        mux=tmp_path,
        forward_agent=forward,
    )
    (tmp_path / "ssh_config").write_text(text)
    own = tmp_path / "config"
    own.write_text(f"{openssh.include(tmp_path / 'ssh_config')}\nHost *\n    ForwardAgent yes\n")
    ansible = selection.ansible_arguments(settings)
    assert f"forwardagent {'yes' if forward else 'no'}" in made_of(f"-F {own} -G {GATE.host}")
    assert "forwardagent yes" in made_of(f"-F {own} -G 192.0.2.1")
    assert "forwardagent no" in made_of(f"{ansible} -G 192.0.2.1")
    assert "forwardagent yes" in made_of(f"{ansible} -A -G 192.0.2.1")


#: Options of all hosts in a person's config with which ssh reaches no worker, or not as it should.
HARM = """\
Host *
    RequestTTY force
    RemoteCommand true
    SessionType none
    StdinNull yes
    ForkAfterAuthentication yes
    Port 2222
    User nobody
    ProxyCommand false
    PubkeyAuthentication no
    ControlPath none
    HostKeyAlias other
    LocalForward 1 localhost:1
    PermitLocalCommand yes
    LocalCommand exit 1
    IdentityAgent /nowhere
    Misspelt yes
"""


def test_ansible_reads_nothing_of_a_persons_config(tmp_path, monkeypatch):
    monkeypatch.setattr(openssh, "home", lambda: tmp_path)
    settings = SETTINGS._replace(state_dir=tmp_path)
    without = selection.ansible_arguments(settings)
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text(HARM)
    assert selection.ansible_arguments(settings) == without
    assert made_of(f"{without} -G 192.0.2.1") == made_of(
        f"-F none {client_config.arguments(selection.ssh_options(settings))} -G 192.0.2.1"
    )


@pytest.mark.parametrize("only_key", [False, True])
def test_ansible_keeps_the_agent_and_the_keys_of_a_persons_config(tmp_path, monkeypatch, only_key):
    monkeypatch.setattr(openssh, "home", lambda: tmp_path)
    settings = SETTINGS._replace(state_dir=tmp_path, only_key=only_key)
    agent, key = tmp_path / "my agent", tmp_path / "my key"
    (tmp_path / ".ssh").mkdir()
    own = f'Host *\n    IdentityAgent "{agent}"\n    IdentityFile "{key}"\n    Misspelt yes\n'
    (tmp_path / ".ssh" / "config").write_text(own)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(agent))
        seen = made_of(f"{selection.ansible_arguments(settings)} -G 192.0.2.1")
    assert f"identityagent {agent}" in seen
    assert (f"identityfile {key}" in seen) is not only_key


@pytest.mark.parametrize("options", [{}, {"proxy_jump": "bastion"}, {"forward_agent": True, "user": "Ada"}])
def test_a_master_is_looked_for_where_ssh_has_its_socket(tmp_path, options):
    (tmp_path / "run time").mkdir()
    found = Ways(SETTINGS._replace(**options), Files(tmp_path), tmp_path / "run time", WORKERS)
    config = tmp_path / "ssh_config"
    config.write_text(
        client_config.ssh_config(
            [(worker, found.of(worker)) for worker in WORKERS],
            user=options.get("user", "ada"),
            private_key=None,
            options=client_config.common_options(tmp_path / "known_hosts"),
            mux=tmp_path / "run time",
            forward_agent=options.get("forward_agent", False),
        )
    )
    for worker in (GATE, INNER_1):
        command = ["ssh", "-F", config, "-G", worker.host]
        seen = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        master = found.master(worker)
        assert master is not None
        assert f"controlpath {master.path}" in seen
        assert f"forwardagent {'yes' if master.agent else 'no'}" in seen
        # What a session has besides: nothing that ssh would send of the environment, and no terminal.
        assert not [line for line in seen if line.startswith(("sendenv", "setenv", "remotecommand"))]
        assert "requesttty auto" in seen
    assert found.master(LOST) is None


def test_a_jump_shares_one_connection_unless_the_person_says_otherwise(tmp_path, monkeypatch):
    monkeypatch.setattr(openssh, "home", lambda: tmp_path)
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text("Host mine\n    HostName 192.0.2.1\n    ControlPath ~/mine-%C\n")
    found = Ways(SETTINGS._replace(proxy_jump="bastion"), Files(tmp_path), tmp_path / "mux", [])
    (tmp_path / "jump_config").write_text(found.jump_config)

    def effective(host: str) -> list[str]:
        command = ["ssh", "-F", tmp_path / "jump_config", "-G", host]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()

    other, mine = effective("other"), effective("mine")
    assert "controlmaster auto" in other
    assert any(line.startswith(f"controlpath {tmp_path}/mux/") for line in other)
    assert "hostname 192.0.2.1" in mine
    assert any(line.startswith("controlpath") and "/mine-" in line for line in mine)


NONE, OTHER = "has no external address", "publishes no instance name"
MANY = workers_of([node("solo", count=1), node("pod", count=5), *(node(f"n{i:04}", count=16) for i in range(1000))])


@pytest.mark.parametrize(
    ("lacking", "said"),
    [
        ({}, []),
        ({"solo-w0": NONE}, [f"worker solo-w0 cannot be reached: it {NONE}"]),
        (
            {"pod-w0": NONE, "pod-w1": NONE, "pod-w2": NONE, "pod-w4": NONE, "solo-w0": NONE},
            [f"5 workers cannot be reached, each {NONE}: pod-w[0-2,4], solo-w0"],
        ),
        (
            {"pod-w0": NONE, "pod-w3": OTHER},
            [
                f"worker pod-w0 cannot be reached: it {NONE}",
                f"worker pod-w3 cannot be reached: it {OTHER}",
            ],
        ),
        (
            {worker.host: NONE for worker in MANY},
            [
                f"16006 workers cannot be reached, each {NONE}: "
                + ", ".join(f"n{i:04}-w[0-15]" for i in range(8))
                + " and those of 994 more nodes"
            ],
        ),
    ],
    ids=["none", "one", "some", "two reasons", "sixteen thousand"],
)
def test_unreachable_workers_are_named_in_one_line_per_reason(lacking, said):
    ways = [(worker, ways_module.Way("", problem=lacking.get(worker.host, ""))) for worker in MANY]
    assert ways_module.problems(ways) == said
