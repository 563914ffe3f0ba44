"""Loads a checkpoint in a process of its own and prints its test accuracy as JSON."""

from __future__ import annotations

import argparse
import json

import checkpoints
import jax

# A single process cannot open the chips of a pod; the CPU is enough for this.
jax.config.update("jax_platforms", "cpu")

import model  # noqa: E402 - the platform is chosen first


def main() -> None:
    """Print {"epoch", "test_accuracy", "test_rows"}."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", default="checkpoints/digits.npz", help="a file, or gs://BUCKET/NAME")
    arguments = parser.parse_args()
    _, _, images, labels = model.load_split()
    data = checkpoints.read(arguments.checkpoint)
    if data is None:
        parser.error(f"{arguments.checkpoint}: there is no checkpoint")
    (parameters, *_), epoch = model.unpacked(data, model.initial_state())
    right = float(model.accuracy(parameters, images, labels))
    print(json.dumps({"epoch": epoch, "test_accuracy": right, "test_rows": len(labels)}))


if __name__ == "__main__":
    main()
