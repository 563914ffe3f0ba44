"""A two-layer perceptron for 8 x 8 images of handwritten digits, its data and its checkpoints."""

from __future__ import annotations

import io

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

PIXELS, HIDDEN, CLASSES = 64, 128, 10


def load_split():
    """Return (train images, train labels, test images, test labels); images are float32 [n, 64] from 0 to 1."""
    digits = load_digits()
    images, labels = digits.data.astype(np.float32) / 16, digits.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:1437], order[1437:]
    return images[train], labels[train], images[test], labels[test]


def initial_parameters(seed: int = 0):
    """Return the parameters every process starts from: the same on all, since the seed is."""
    first, second = jax.random.split(jax.random.key(seed))
    return {
        "w1": jax.random.normal(first, (PIXELS, HIDDEN)) * (2 / PIXELS) ** 0.5,
        "b1": jnp.zeros(HIDDEN),
        "w2": jax.random.normal(second, (HIDDEN, CLASSES)) * (2 / HIDDEN) ** 0.5,
        "b2": jnp.zeros(CLASSES),
    }


def logits(parameters, images):
    """Return the unnormalised scores [n, 10] of images [n, 64]."""
    hidden = jax.nn.relu(images @ parameters["w1"] + parameters["b1"])
    return hidden @ parameters["w2"] + parameters["b2"]


def accuracy(parameters, images, labels):
    """Return the share of images that are classified correctly."""
    return jnp.mean(jnp.argmax(logits(parameters, images), axis=1) == labels)


def packed(state, epoch: int) -> bytes:
    """Return a checkpoint: all that the training needs to go on behind an epoch."""
    leaves, _ = jax.tree.flatten(state)
    data = io.BytesIO()
    np.savez(data, epoch=epoch, **{str(number): np.asarray(leaf) for number, leaf in enumerate(leaves)})
    return data.getvalue()


def unpacked(data: bytes, like):
    """Return (state, epoch) of a checkpoint, given a state of the same form."""
    with np.load(io.BytesIO(data)) as file:
        leaves, form = jax.tree.flatten(like)
        return jax.tree.unflatten(form, [file[str(number)] for number in range(len(leaves))]), int(file["epoch"])


def initial_state():
    """Return (parameters, mean, square, step) for Adam, as every process starts."""
    parameters = initial_parameters()
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    return parameters, zeros, zeros, jnp.zeros(())
