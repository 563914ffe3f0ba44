"""A stand-in for ssh that plays masters and sessions on this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

#: Plays OpenSSH: `-O check|stop`, `-f -N` (open a master), else a session, which by a proxy that is none has to have a
#: master; for hosts as files in $PLAY.
STAND_IN = r"""#!/bin/sh
echo "$*" >>"$PLAY/calls"
for last; do :; done
case "$*" in
*"-O check"*) [ -e "$PLAY/master-$last" ]; exit ;;
*"-O stop"*) rm -f "$PLAY/master-$last"; exit 0 ;;
*"-f -N"*)
    if [ -e "$PLAY/denied-$last" ]; then echo "ada@$last: Permission denied (publickey)." >&2; exit 255; fi
    if [ -e "$PLAY/down-$last" ]; then
        while [ -e "$PLAY/held-$last" ]; do touch "$PLAY/holding-$last"; sleep 0.02; done
        echo "ssh: connect to host $last port 22: Connection refused" >&2
        exit 255
    fi
    if rm "$PLAY/blinks-$last" 2>/dev/null; then echo "Connection closed by UNKNOWN port 65535" >&2; exit 255; fi
    exec 9>"$PLAY/signs"
    # Until so many have come to ask as the file says.
    while [ "$(grep -c -e '-f -N' "$PLAY/calls")" -lt "$(cat "$PLAY/agent-for-none" 2>/dev/null || echo 0)" ]; do
        sleep 0.02
    done
    if [ -e "$PLAY/agent-for-one" ] && ! flock -n 9 || [ -e "$PLAY/agent-for-none" ]; then
        echo "sign_and_send_pubkey: signing failed for ED25519 \"k\" from agent: agent refused operation" >&2
        echo "ada@$last: Permission denied (publickey)." >&2
        exit 255
    fi
    [ ! -e "$PLAY/agent-for-one" ] || sleep 0.1
    touch "$PLAY/master-$last"
    exit 0 ;;
esac
all="$*"
shift $(($# - 2))
case "$all" in
*"ProxyCommand=false"*)
    if [ ! -e "$PLAY/master-$1" ]; then echo "Connection closed by UNKNOWN port 65535" >&2; exit 255; fi
    if [ -e "$PLAY/full-$1" ]; then
        echo "mux_client_request_session: session request failed: Session open refused by peer" >&2
        echo "Connection closed by UNKNOWN port 65535" >&2
        exit 255
    fi ;;
esac
if rm "$PLAY/stale-$1" 2>/dev/null; then echo "mux_client_request_session: read from master failed" >&2; exit 255; fi
if [ -e "$PLAY/cut-$1" ]; then sh -c "$2" | head -c 40; echo "Connection to $1 closed by remote host." >&2; exit 255; fi
if [ -e "$PLAY/proxy-$1" ]; then cat "$PLAY/proxy-$1" >&2; exit 255; fi
[ ! -e "$PLAY/mute-$1" ] || exec sleep 30
echo "noise of the login shell"
export HOST_NAME="$1"
exec sh -c "$2"
"""

#: Plays the host program: echoes the request, or follows.
PROGRAM = r"""#!{python}
import json, select, struct, sys
request = json.loads(sys.stdin.readline())
if request["action"] == "look":
    request["gone"] = bool(select.select([sys.stdin], [], [], 0.3)[0])
sys.stdout.write("\n%s\n%s\n" % (request["marker"], json.dumps({{"ok": True, "request": request}})))
sys.stdout.flush()
if request["action"] == "follow":
    last = request.get("last", "E").encode()
    for kind, offset, data in ((b"D", 0, b"ab"), (b"G", 10, b""), (b"D", 10, b"c"), (last, 11, b"{{}}")):
        sys.stdout.buffer.write(struct.pack(">cQI", kind, offset, len(data)) + data)
    if request.get("cut"):
        sys.stdout.buffer.flush()
"""


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that steers the stand-in, which is first on PATH."""
    folder = tmp_path / "play"
    (tmp_path / "bin").mkdir()
    folder.mkdir()
    for name, text in {"ssh": STAND_IN, "sudo": PROGRAM.format(python=sys.executable)}.items():
        path = tmp_path / "bin" / name
        path.write_text(text)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PLAY", str(folder))
    (folder / "calls").touch()
    return folder
