"""`tpu_ops tensorboard`: TensorBoard on a worker, reachable on this machine."""

from __future__ import annotations

import argparse

from tpu_ops.cli import serving
from tpu_ops.errors import UsageError
from tpu_ops.runs import servers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops tensorboard`."""
    serving.add_arguments(parser, "tensorboard", 6006)
    parser.add_argument(
        "--logdir", metavar="D", help="the directory of the event files, below your home there; or gs://BUCKET/PATH"
    )
    parser.epilog = "Ctrl-C ends the tunnel and TensorBoard."


def run(args: argparse.Namespace) -> int:
    """Start TensorBoard and keep it reachable."""
    if not (args.logdir or args.stop):
        raise UsageError("no directory of event files", where="--logdir", fix="name one, as in --logdir runs")
    return serving.run(args, "tensorboard", lambda venv: servers.tensorboard(venv, args.logdir, more=args.more))
