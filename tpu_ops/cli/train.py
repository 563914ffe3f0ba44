"""`tpu_ops train`: start a command on all workers of one or more nodes at once, and follow the run to its end."""

from __future__ import annotations

import argparse
import os
import shlex

from tpu_ops import config, files
from tpu_ops.cli import (
    faults,
    foreground,
    interrupts,
    options,
    recover_options,
    run_end,
    runs_output,
    stall_options,
)
from tpu_ops.cli import sync as cli_sync
from tpu_ops.cli.run import words
from tpu_ops.cli.train_job import Job, ranked
from tpu_ops.cloud import bucket_places
from tpu_ops.errors import UsageError
from tpu_ops.fleet import contact
from tpu_ops.runs import (
    bucket_check,
    control,
    installs,
    preflight,
    projects,
    ranks,
    recovery,
    spec,
    sync,
)

#: Tells the dispatcher that the words after `--` are a command.
TAKES_COMMAND = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops train`."""
    parser.add_argument("target", help="a node (pod), or several nodes of one type, each as a slice (a,b or pod-[1-2])")
    parser.add_argument(
        "--sync",
        metavar="DIR",
        help="copy this directory, without files that git ignores, to ~/tpu_ops/<its name> on every worker and start "
        "there",
    )
    parser.add_argument("--env", action="append", default=[], metavar="KEY=VALUE", help="set a variable (repeatable)")
    parser.add_argument("--name", default="", metavar="ID", help="the run's id (default: made from command and time)")
    parser.add_argument("--detach", action="store_true", help="return once the command runs on every worker")
    parser.add_argument("--rank", default="0", metavar="all|LIST", help=runs_output.RANKS_SHOWN)
    parser.add_argument(
        "--install",
        action=argparse.BooleanOptionalAction,
        help="install what the uv.lock, requirements.txt or pyproject.toml of DIR lists into an environment of the "
        "project, the same on all workers (default: if an earlier run of the project did)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check the workers, and with --sync look for files that block the copy; show what would be started",
    )
    code = parser.add_argument_group("code, environment, user and secrets")
    code.add_argument(
        "--git",
        default="",
        metavar="[PROJECT@]REF",
        help="check out a project of `workspace_projects` at this branch, tag or commit on every worker and start "
        "there; needs full passwordless sudo on the workers",
    )
    code.add_argument("--venv", default="", metavar="PATH", help="a virtual environment on the workers (absolute path)")
    code.add_argument(
        "--env-file",
        type=lambda text: files.expanded(text, "--env-file"),
        action="append",
        default=[],
        metavar="FILE",
        help="read variables from KEY=VALUE lines; values are taken literally, quotes included (repeatable)",
    )
    code.add_argument(
        "--secret",
        action="append",
        default=[],
        metavar="NAME[=FILE]",
        help="give the value of this shell's variable NAME, or the contents of FILE, to the command only: as variable "
        "NAME, and as a file whose path is in NAME_FILE (repeatable)",
    )
    code.add_argument(
        "--shell", action="store_true", help="run the command as one line of /bin/sh on every worker, its words joined"
    )
    code.add_argument(
        "--user", default="", metavar="U", help="run as this user; needs full passwordless sudo on the workers"
    )
    again = parser.add_argument_group("recovery after preemptions and failures")
    recover_options.add_arguments(again)
    recover_options.add_budgets(again)
    stall_options.add_arguments(parser.add_argument_group("runs that stand still"))
    run_end.add_arguments(parser.add_argument_group("after the end of the run"))
    checks = parser.add_argument_group("checks before the start")
    forcible = "; ".join(preflight.CHECKS[check] for check in preflight.FORCIBLE)
    checks.add_argument("--force", action="store_true", help=f"start although one of these checks fails: {forcible}")
    checks.add_argument(
        "--bucket",
        action="append",
        default=[],
        metavar="NAME",
        help="check the location of this bucket, besides those of gs:// URIs in the command and its variables "
        "(repeatable)",
    )
    checks.add_argument(
        "--any-region", action="store_true", help="start although a bucket is in another region, and pay for transfers"
    )
    shows = parser.add_argument_group("output, exit code and fleet")
    options.add_exit_code(shows)
    options.add_json(shows)
    options.add_fleet(shows)
    limits = parser.add_argument_group("time limits")
    for option, value, what in (
        ("--barrier", spec.BARRIER, "that all workers get to become ready"),
        ("--lease", spec.LEASE, "of silence after which a worker is considered lost"),
        ("--exit-skew", spec.EXIT_SKEW, "that the other ranks may keep running after a rank has exited with 0"),
    ):
        limits.add_argument(
            option,
            type=options.seconds,
            default=value,
            metavar="SECONDS",
            help=f"seconds {what} (default: {value:.0f})",
        )
    parser.usage = "%(prog)s TARGET [OPTION...] -- COMMAND..."
    parser.epilog = "The command and its arguments are passed on unchanged; for a shell line: --shell -- 'LINE'"


@interrupts.ended_by_signals()
def run(args: argparse.Namespace) -> int:
    """Check the workers, copy the code, start the run, and follow it to its end."""
    recover_options.check(args)
    run_end.check(args, detached=args.detach)
    stall = stall_options.chosen(args)
    env = spec.variables(spec.parse_env(args.env), args.env_file, again=args.recover)
    if args.git:
        projects.check(args.git, args.sync)
    command = words(args.command, f"tpu_ops train {shlex.quote(args.target)} -- python train.py")
    given = [bucket_places.name_of(text, "--bucket") for text in args.bucket]
    buckets = list(dict.fromkeys([*given, *bucket_places.named_in([*command, *env.values()])]))
    fleet = contact.serving(*contact.find(config.load(args.fleet), args.target))
    workers = ranked(fleet, args.target)
    shown = ranks.parse(args.rank, len(workers))
    if args.name and control.is_target(fleet, args.name):
        what = f"{args.name!r} is the name of a node or worker, so it cannot be the id of a run"
        raise UsageError(what, where="--name", fix="choose another name")
    if args.sync and args.user:
        what = f"--sync copies the directory to your home, but {args.user} would start in another home"
        raise UsageError(what, where="--sync and --user", fix="leave out one of the two options")
    tree = sync.read(files.resolved(args.sync, "--sync")) if args.sync else None
    listed = installs.listing(tree) if tree and args.install is not False else None
    if args.install and not listed:
        what = "there is no uv.lock, requirements.txt or pyproject.toml with packages to install"
        raise UsageError(
            what, where=f"--sync {args.sync}" if args.sync else "--install", fix="name its directory: --sync DIR"
        )
    line = " ".join(command)
    typed = line.split() if args.shell else command
    if not args.git:
        cli_sync.warn_of_scripts(typed, args.user, tree)
    called = spec.name_of(typed, tree.name if tree else "")
    run_spec = spec.RunSpec(
        run_id=args.name or spec.new_run_id(called),
        argv=("/bin/sh", "-c", line) if args.shell else tuple(command),
        env=env,
        secrets=spec.read_secrets(args.secret, os.environ),
        user=args.user,
        cwd=tree.cwd if tree else "",
        venv=args.venv,
        barrier=args.barrier,
        lease=args.lease,
        exit_skew=args.exit_skew,
        code_digest=tree.digest if tree else "",
        force=args.force,
        stall=stall,
    )
    job = Job(fleet, workers, run_spec, tree, shown, args, listed)
    with faults.told(run_spec.run_id, fleet.settings, as_json=args.json, more=job.facts):
        regions = [worker.node.region for worker in workers]
        bucket_check.check(buckets, regions, fleet.settings, any_region=args.any_region)
        if args.git:
            job.bring()
        if args.recover:
            job.look_ahead()
        after = run_end.RunEnd(args, job.fleet_now)
        if args.recover and not args.dry_run:
            with recovery.alone(fleet.settings.state_dir, run_spec.run_id):
                guard = job.recovered()
                return after.after(lambda: guard.to_the_end(job.run()), guard.begun_run, lambda: guard.ended)
        return after.after(
            lambda: foreground.to_its_end(job.run(), job.running, job.left, job.stopped, as_json=args.json),
            job.begun_run,
            lambda: job.ended,
        )
