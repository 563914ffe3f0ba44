"""Stands for gcloud's tunnel through Identity-Aware Proxy: its end is in the container of the named instance.

It takes exactly the words of `gcloud compute start-iap-tunnel` that tpu_ops writes (a test of the real gcloud proves
that it takes them, too), notes them in $TUNNELS, and passes standard input and output on to sshd in the container.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

RELAY = """
import socket, sys, threading
sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
def send():
    while data := sys.stdin.buffer.raw.read(65536):
        sock.sendall(data)
    sock.shutdown(socket.SHUT_WR)
threading.Thread(target=send, daemon=True).start()
while data := sock.recv(65536):
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="gcloud", allow_abbrev=False)
    parser.add_argument("group", choices=["compute"])
    parser.add_argument("command", choices=["start-iap-tunnel"])
    parser.add_argument("instance")
    parser.add_argument("port", type=int)
    parser.add_argument("--listen-on-stdin", action="store_true", required=True)
    parser.add_argument("--project", choices=["lab"], required=True)
    parser.add_argument("--zone", choices=["us-central2-b"], required=True)
    parser.add_argument("--verbosity", choices=["error"], required=True)
    args = parser.parse_args()
    engine = json.loads(os.environ["ENGINE"])
    with Path(os.environ["TUNNELS"]).open("a") as notes:
        notes.write(f"{args.instance}\n")
    for name in json.loads(os.environ["CONTAINERS"]):
        host = [*engine, "inspect", "--format", "{{.Config.Hostname}}", name]
        if subprocess.run(host, capture_output=True, text=True, check=True).stdout.strip() == args.instance:
            os.execvp(engine[0], [*engine, "exec", "-i", name, "python3", "-c", RELAY, str(args.port)])  # noqa: S606
    sys.exit(f"ERROR: (gcloud.compute.start-iap-tunnel) Error while connecting [4047: 'no {args.instance}'].")


if __name__ == "__main__":
    main()
