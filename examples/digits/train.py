"""Trains on every worker of a pod at once, data-parallel over all chips.

The same file runs on a real pod, on a single host, and on the lab's CPU workers: `jax.distributed.initialize()`
finds the other processes by itself. Every process reads only its own rows of the data set. With `tpu_ops train
--recover`, later attempts go on from the last checkpoint; one in a bucket outlives the nodes.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback

import checkpoints
import jax
import jax.numpy as jnp
import model
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from shards import rows_of_process

LEARNING_RATE, DECAY_MEAN, DECAY_SQUARE = 3e-3, 0.9, 0.99


def loss_of(parameters, images, labels):
    """Return the mean cross entropy."""
    scores = jax.nn.log_softmax(model.logits(parameters, images))
    return -jnp.mean(jnp.take_along_axis(scores, labels[:, None], axis=1))


@jax.jit
def train_step(state, images, labels):
    """Take one step of Adam on a global batch; XLA adds up the gradients of all processes."""
    parameters, mean, square, step = state
    step += 1
    loss, gradient = jax.value_and_grad(loss_of)(parameters, images, labels)
    mean = jax.tree.map(lambda m, g: DECAY_MEAN * m + (1 - DECAY_MEAN) * g, mean, gradient)
    square = jax.tree.map(lambda s, g: DECAY_SQUARE * s + (1 - DECAY_SQUARE) * g * g, square, gradient)
    rate = LEARNING_RATE * jnp.sqrt(1 - DECAY_SQUARE**step) / (1 - DECAY_MEAN**step)
    parameters = jax.tree.map(lambda p, m, s: p - rate * m / (jnp.sqrt(s) + 1e-8), parameters, mean, square)
    return (parameters, mean, square, step), loss


def begin(checkpoint: str, *, resume: bool):
    """Return (state, epochs done): at the beginning, or where the checkpoint is."""
    state, done = model.initial_state(), 0
    if resume:
        # Rank 0 reads it for all: a file of its worker is there, and all begin with the same one.
        if jax.process_index() == 0 and (data := checkpoints.read(checkpoint)):
            state, done = model.unpacked(data, state)
        state, done = multihost_utils.broadcast_one_to_all((state, np.int32(done)))
        found = f"the checkpoint of epoch {int(done)}" if done else f"the beginning: {checkpoint} is not there"
        print(f"going on from {found}", flush=True)
    return state, int(done)


def main() -> None:
    """Train, print loss and test accuracy of each epoch, write a checkpoint after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="rows over all processes")
    parser.add_argument("--checkpoint", default="checkpoints/digits.npz", help="a file, or gs://BUCKET/NAME")
    parser.add_argument(
        "--resume",
        action="store_true",
        default=int(os.environ.get("TPU_OPS_ATTEMPT", "1")) > 1,
        help="go on from the checkpoint; later attempts of a run always do",
    )
    arguments = parser.parse_args()

    jax.distributed.initialize()
    rank, ranks = jax.process_index(), jax.process_count()
    print(f"process {rank} of {ranks}, {jax.local_device_count()} of {jax.device_count()} devices", flush=True)

    mesh = Mesh(np.array(jax.devices()), ("batch",))
    split, whole = NamedSharding(mesh, PartitionSpec("batch")), NamedSharding(mesh, PartitionSpec())
    train_images, train_labels, test_images, test_labels = model.load_split()
    mine = rows_of_process(len(train_images), rank, ranks)
    images, labels = train_images[mine], train_labels[mine]

    state, done = begin(arguments.checkpoint, resume=arguments.resume)
    state = jax.device_put(state, whole)
    share = -(-arguments.batch_size // jax.device_count()) * jax.local_device_count()
    score = jax.jit(model.accuracy)
    for epoch in range(done + 1, arguments.epochs + 1):
        order = np.random.default_rng(epoch).permutation(len(images))
        losses = []
        for start in range(0, len(order) - share + 1, share):
            batch = order[start : start + share]
            state, loss = train_step(
                state,
                jax.make_array_from_process_local_data(split, images[batch]),
                jax.make_array_from_process_local_data(split, labels[batch]),
            )
            losses.append(loss)
        average = float(np.mean([float(loss) for loss in losses]))
        right = float(score(state[0], test_images, test_labels))
        print(f"epoch {epoch} loss {average:.4f} test accuracy {right:.4f}", flush=True)
        # Only rank 0: writing checkpoints, and an experiment tracker's log calls.
        if rank == 0:
            checkpoints.write(arguments.checkpoint, model.packed(state, epoch))
            print(f"checkpoint {arguments.checkpoint} epoch {epoch}", flush=True)
        # JAX takes SIGTERM, as a stop and a preemption send it, for the notice to end in the same epoch everywhere.
        if multihost_utils.reached_preemption_sync_point(epoch):
            print(f"asked to end: epoch {epoch} was the last", flush=True)
            break


if __name__ == "__main__":
    try:
        main()
    except Exception:
        # JAX would have this rank wait at its exit for the others, which wait for it, and blame another one in the end.
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)
