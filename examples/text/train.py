"""Trains a small language model on all workers at once, its parameters and optimizer state split over all chips.

It shows what larger programs use: a model from a Hugging Face configuration, optax, input that grain splits by process,
and orbax checkpoints from which later attempts of `tpu_ops train --recover` go on. A pod needs a place for checkpoints
that all workers reach: gs://BUCKET/NAME, or a mounted directory.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import traceback
from pathlib import Path

import data
import jax
import model
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def split_over(mesh, value):
    """Return how an array is split over the chips: along its first axis that can be, else it is everywhere."""
    axis = next((axis for axis, size in enumerate(value.shape) if size % mesh.size == 0 and size >= mesh.size), None)
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, "chips") if axis is not None else PartitionSpec())


def main() -> None:
    """Train, print the loss, and write checkpoints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default=Path(__file__).with_name("config.json"), type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32, help="rows over all processes")
    parser.add_argument("--checkpoint", default="checkpoints/text", help="a directory, or gs://BUCKET/NAME")
    parser.add_argument("--every", type=int, default=50, help="steps between two checkpoints")
    arguments = parser.parse_args()

    jax.distributed.initialize()
    rank, ranks = jax.process_index(), jax.process_count()
    print(f"process {rank} of {ranks}, {jax.local_device_count()} of {jax.device_count()} devices", flush=True)
    mesh = Mesh(np.array(jax.devices()), ("chips",))
    rows = NamedSharding(mesh, PartitionSpec("chips"))

    config = json.loads(arguments.config.read_text())
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, arguments.steps // 10, arguments.steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))

    def begin(key):
        parameters = model.initial(config, key)
        return parameters, optimizer.init(parameters)

    def loss_of(parameters, tokens):
        scores = model.logits(config, parameters, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:]).mean()

    shapes = jax.eval_shape(begin, jax.random.key(0))
    places = jax.tree.map(functools.partial(split_over, mesh), shapes)

    @functools.partial(jax.jit, out_shardings=(places, None), donate_argnums=0)
    def train_step(state, tokens):
        parameters, optimizing = state
        loss, gradient = jax.value_and_grad(loss_of)(parameters, tokens)
        updates, optimizing = optimizer.update(gradient, optimizing, parameters)
        return (optax.apply_updates(parameters, updates), optimizing), loss

    place = arguments.checkpoint if "://" in arguments.checkpoint else str(Path(arguments.checkpoint).absolute())
    options = ocp.CheckpointManagerOptions(save_interval_steps=arguments.every, max_to_keep=2)
    with ocp.CheckpointManager(place, options=options) as checkpoints:
        done = checkpoints.latest_step() or 0
        if done:
            wanted = jax.tree.map(lambda s, p: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p), shapes, places)
            state = checkpoints.restore(done, args=ocp.args.StandardRestore(wanted))
            print(f"going on from step {done}", flush=True)
        else:
            state = jax.jit(begin, out_shardings=places)(jax.random.key(0))
        mine = data.batches(config["max_position_embeddings"], arguments.batch_size // ranks, rank, ranks)
        for step in range(done + 1, arguments.steps + 1):
            state, loss = train_step(state, jax.make_array_from_process_local_data(rows, np.asarray(mine[step])))
            if step % 10 == 0 or step == arguments.steps:
                print(f"step {step} loss {float(loss):.3f}", flush=True)
            # JAX takes SIGTERM, as a stop and a preemption send it, for the notice to end at the same step everywhere.
            ending = multihost_utils.reached_preemption_sync_point(step) or step == arguments.steps
            checkpoints.save(step, args=ocp.args.StandardSave(state), force=ending)
            if ending:
                break
    print(f"step {step} is in {place}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except Exception:
        # JAX would have this rank wait at its exit for the others, which wait for it, and blame another one in the end.
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)
