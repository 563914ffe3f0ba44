"""`tpu_ops jupyter`: a notebook server on a worker, reachable on this machine."""

from __future__ import annotations

import argparse

from tpu_ops.cli import serving
from tpu_ops.runs import servers

#: Printed before the server starts.
_WARNING = (
    "once a notebook imports JAX, it holds the chips: nobody can start a run on this worker until its kernel is shut "
    "down (`tpu_ops who` shows it)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops jupyter`."""
    serving.add_arguments(parser, "jupyter", 8888)
    parser.add_argument(
        "--no-lab", action="store_true", help="without the pages of JupyterLab, for an editor that connects to the URL"
    )
    parser.epilog = "Ctrl-C ends the tunnel, the server and its kernels."


def run(args: argparse.Namespace) -> int:
    """Start the notebook server and keep it reachable."""
    page = "?token={}" if args.no_lab else "lab?token={}"
    return serving.run(
        args, "jupyter", lambda venv: servers.jupyter(venv, pages=not args.no_lab, more=args.more), page, _WARNING
    )
