"""Examples of each command, which its --help ends with."""

from __future__ import annotations

#: Words of a command after `tpu_ops` -> its examples, each with what it does.
EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "init": (
        ("tpu_ops init my-fleet", "asks for project, zones, key and packages"),
        ("tpu_ops init my-fleet --project my-project --zone us-central2-b", "asks only for the rest"),
    ),
    "list": (
        ("tpu_ops list", "all workers, as the API lists them now"),
        ("tpu_ops list --type 'v4-*' --state READY --cached", "some of them, without asking the API"),
        ("tpu_ops list --use", "who holds the chips of each worker, and what these do"),
    ),
    "who": (
        ("tpu_ops who", "all READY nodes"),
        ("tpu_ops who pod --watch", "one node, again every few seconds"),
    ),
    "top": (
        ("tpu_ops top", "all READY nodes, again every few seconds"),
        ("tpu_ops top pod --once", "one table of one node, also for a script"),
    ),
    "doctor": (
        ("tpu_ops doctor pod", "is this node ready for a run?"),
        ("tpu_ops doctor --self", "does this machine have all that is needed?"),
    ),
    "refresh": (
        ("tpu_ops refresh", "after a change of addresses"),
        ("tpu_ops refresh --from gs://my-bucket/fleet.json", "a fleet that somebody publishes"),
    ),
    "snapshot": (
        ("tpu_ops snapshot", "where the local snapshot is from, and how old it is"),
        ("tpu_ops snapshot --publish gs://my-bucket/fleet.json", "for people without credentials"),
    ),
    "inventory": (
        ('clush -w "$(tpu_ops inventory pod)" uptime', "a node set for other programs"),
        ("tpu_ops inventory @all --format list", "one name a line"),
    ),
    "grant": (
        ("tpu_ops grant", "what the grant allows, and what is used of it"),
        ("tpu_ops grant import mail.txt --ends 2027-01-31", "write grant.yml from Google's e-mail"),
    ),
    "create": (
        ("tpu_ops create pod --type v4-32 --zone us-central2-b", "a node of four workers"),
        ("tpu_ops create 'tpu-[1-4]' --type v5litepod-8 --zone us-west4-a,us-east5-b --spot --until-capacity 12h", ""),
    ),
    "apply": (
        ("tpu_ops apply --dry-run", "what has to be done for nodes.yml"),
        ("tpu_ops apply --yes", "do it, without a question"),
    ),
    "delete": (
        ("tpu_ops delete pod", "asks first"),
        ("tpu_ops delete 'tpu-[1-4]' --yes --no-wait", "several nodes, at once"),
    ),
    "node": (
        ("tpu_ops node stop box", "no cost but that of its disk until it is started"),
        ("tpu_ops node describe pod", "all facts of a node"),
    ),
    "disk": (
        ("tpu_ops disk create data --size 500 --zone us-central2-b", ""),
        ("tpu_ops disk attach data box --mount /mnt/data --format", ""),
    ),
    "disk create": (
        ("tpu_ops disk create data --size 500 --zone us-central2-b", ""),
        ("tpu_ops disk create fast --size 100 --type pd-ssd --dry-run", ""),
    ),
    "disk list": (
        ("tpu_ops disk list", "all disks, with the nodes that have them"),
        ("tpu_ops disk list --json", "for a script"),
    ),
    "disk attach": (
        ("tpu_ops disk attach data box --mount /mnt/data --format", "a new disk"),
        ("tpu_ops disk attach data pod --mode ro --mount /mnt/data", "to all workers of a pod"),
    ),
    "disk detach": (
        ("tpu_ops disk detach data box --unmount /mnt/data", ""),
        ("tpu_ops disk detach data box --no-unmount", "a disk that is not mounted"),
    ),
    "disk delete": (
        ("tpu_ops disk delete data", "asks first"),
        ("tpu_ops disk delete data --zone us-central2-b --yes", ""),
    ),
    "bucket": (
        ("tpu_ops bucket create my-data", "in the region of the nodes"),
        ("tpu_ops bucket check my-data", "where it is, and what reading it costs"),
    ),
    "bucket create": (
        ("tpu_ops bucket create my-data", "in the fleet's only region"),
        ("tpu_ops bucket create my-data --region us-central2 --dry-run", ""),
    ),
    "bucket check": (
        ("tpu_ops bucket check my-data", "for the whole fleet"),
        ("tpu_ops bucket check my-data pod", "for one node"),
    ),
    "configure": (
        ("tpu_ops configure", "the whole fleet; again whenever something changes"),
        ("tpu_ops configure pod --tags users --check", "what would change for people on one node"),
    ),
    "drift": (
        ("tpu_ops drift", "the whole fleet"),
        ("tpu_ops drift pod --tags users,python", "these roles on one node"),
    ),
    "lock": (
        ("tpu_ops lock", "after a change of jax_packages, keeping other versions"),
        ("tpu_ops lock --upgrade", "the newest versions that the lists allow"),
    ),
    "invite": (
        ("tpu_ops invite ada", "create her accounts, and print the message to send"),
        ("tpu_ops invite ada --no-configure --file ada.txt", "only write the message"),
    ),
    "ssh": (
        ("tpu_ops ssh pod-w2", "log in"),
        ("tpu_ops ssh pod nvtop", "one command, on worker 0"),
    ),
    "tunnel": (
        ("tpu_ops tunnel pod 6006", "http://localhost:6006 is TensorBoard's port of worker 0"),
        ("tpu_ops tunnel pod-w2 8888 9999", "its port 8888 is port 9999 here"),
    ),
    "jupyter": (
        ("tpu_ops jupyter pod", "a notebook on worker 0, in the environment of runs; prints its URL"),
        ("tpu_ops jupyter pod-w2 8889 --with matplotlib --detach", "on another port here, with one more package"),
    ),
    "tensorboard": (
        ("tpu_ops tensorboard pod --logdir tpu_ops/my-code/logs", "event files on worker 0"),
        ("tpu_ops tensorboard pod --logdir gs://my-bucket/logs", "event files in a bucket"),
    ),
    "ssh-config": (
        ("tpu_ops ssh-config --install", "then: ssh pod-w0, scp, rsync, VS Code"),
        ("tpu_ops ssh-config --print", "to copy parts of it"),
    ),
    "keys": (
        ("tpu_ops keys push pod", "to one node"),
        ("tpu_ops keys push my-project --dry-run", "what would be added for all machines of a project"),
    ),
    "firewall": (
        ("tpu_ops firewall ssh --source 203.0.113.7/32", "from one address"),
        ("tpu_ops firewall mosh --source 203.0.113.0/24 --dry-run", "show the rule for mosh"),
    ),
    "run": (
        ("tpu_ops run pod -- df -h /", "on all workers of a node"),
        ("tpu_ops run @all --shell -- 'ls /tmp | wc -l'", "a line of a shell, everywhere"),
    ),
    "sync": (
        ("tpu_ops sync pod my-code", "to ~/tpu_ops/my-code on every worker"),
        ("tpu_ops sync pod my-code --dry-run", "what would be copied and removed"),
    ),
    "train": (
        ("tpu_ops train pod --sync my-code -- python train.py --lr 0.1", "and follow rank 0"),
        ("tpu_ops train pod --recover --detach --sync my-code -- python train.py", "starts again if the node is lost"),
        ("tpu_ops train pod --on-stall stop -- python train.py", "ends the run if all ranks and chips stand still"),
    ),
    "attach": (
        ("tpu_ops attach pod", "the run on this node"),
        ("tpu_ops attach RUN --rank all --since 10m", "all ranks, and the last ten minutes"),
    ),
    "stop": (
        ("tpu_ops stop pod", "the run on this node"),
        ("tpu_ops stop RUN --grace 120", "SIGKILL only after two minutes"),
    ),
    "status": (
        ("tpu_ops status RUN", "its state, rank by rank"),
        ("tpu_ops status pod --json", "of the run on this node, for a script"),
    ),
    "logs": (
        ("tpu_ops logs RUN --rank all", "the output of all ranks so far"),
        ("tpu_ops logs RUN --fetch logs", "copy the logs to logs/RUN/rank-N.log"),
    ),
    "stacks": (
        ("tpu_ops stacks RUN", "one line for each place at which ranks are"),
        ("tpu_ops stacks pod --rank 3 --full", "all threads of a rank of the run on this node"),
    ),
    "runs": (
        ("tpu_ops runs", "active runs, and the last that this machine started"),
        ("tpu_ops runs --json", "for a script"),
    ),
    "report": (
        ("tpu_ops report RUN --html run.html", "one page with pictures, to send to others"),
        ("tpu_ops report --days 30", "who used how much of the fleet in the last month"),
    ),
    "profile": (
        ("tpu_ops profile RUN --seconds 5", "into profiles/RUN, for xprof and TensorBoard"),
        ("tpu_ops profile pod my-profiles --port 9012 --rank 0,3", "two ranks, by the port of their profiler"),
    ),
    "fetch": (
        ("tpu_ops fetch RUN checkpoints results", "from rank 0"),
        ("tpu_ops fetch pod --rank all /tmp/profile results", "from each worker into a directory of its own"),
    ),
    "unlock": (
        ("tpu_ops unlock pod", "asks first"),
        ("tpu_ops unlock pod-w2 --yes --grace 5", ""),
    ),
    "lab": (
        ("tpu_ops lab up", "start it"),
        ('eval "$(tpu_ops lab env)"', "use it in this shell"),
    ),
    "completion": (
        ("source <(tpu_ops completion bash)", "in ~/.bashrc; in ~/.zshrc with zsh"),
        ("tpu_ops completion fish >~/.config/fish/completions/tpu_ops.fish", "once"),
    ),
    "lab up": (
        ("tpu_ops lab up", ""),
        ("TPU_OPS_LAB=second tpu_ops lab up", "another lab beside the first"),
    ),
    "lab down": (
        ("tpu_ops lab down", "this lab"),
        ("tpu_ops lab down --all --cache", "every lab, and what they share"),
    ),
    "lab chips": (
        ("tpu_ops lab chips pod idle", "no program runs on the chips of the node's workers"),
        ("tpu_ops lab chips pod-w0 hung --first-id 8", "one worker, with other ids"),
    ),
    "lab env": (
        ('eval "$(tpu_ops lab env)"', "this shell uses the lab"),
        ("tpu_ops lab env --json", "for a script"),
    ),
    "lab status": (
        ("tpu_ops lab status", ""),
        ("tpu_ops lab status --json", "for a script"),
    ),
    "lab maintenance": (
        ("tpu_ops lab maintenance pod", ""),
        ("tpu_ops lab maintenance pod --zone us-central2-b", "if several nodes share the name"),
    ),
    "lab preempt": (
        ("tpu_ops lab preempt pod", ""),
        ("tpu_ops lab preempt pod --zone us-central2-b", "if several nodes share the name"),
    ),
    "lab capacity": (
        ("tpu_ops lab capacity --stockout us-central2-b:v4=5m", "no v4 there for five minutes"),
        ("tpu_ops lab capacity --unlimited", "no limits"),
    ),
    "lab api": (
        ("tpu_ops lab api --state /tmp/fleet.json", ""),
        ("tpu_ops lab api --state /tmp/fleet.json --port 9000 --seconds 0", ""),
    ),
}


def of(words: str) -> str:
    """Return the last part of a command's help, given its words after `tpu_ops`."""
    lines = ["examples:"]
    for command, what in EXAMPLES.get(words, ()):
        lines += [f"  {command}", f"      {what}"] if what else [f"  {command}"]
    return "\n".join(lines)
