"""A transformer of the Llama family, from a configuration file as Hugging Face writes it (config.json)."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def initial(config, key):
    """Return the parameters, all layers stacked: each array's first axis is the layer."""
    layers, width, hidden = config["num_hidden_layers"], config["hidden_size"], config["intermediate_size"]
    head = width // config["num_attention_heads"]
    grouped = config["num_key_value_heads"] * head
    shapes = {
        "query": (layers, width, width),
        "key": (layers, width, grouped),
        "value": (layers, width, grouped),
        "output": (layers, width, width),
        "gate": (layers, width, hidden),
        "up": (layers, width, hidden),
        "down": (layers, hidden, width),
        "embedding": (config["vocab_size"], width),
    }
    scale = config["initializer_range"]
    keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
    weights = {name: scale * jax.random.normal(keys[name], shape) for name, shape in shapes.items()}
    norms = {"before_attention": (layers, width), "before_feed_forward": (layers, width), "last": (width,)}
    return weights | {name: jnp.ones(shape) for name, shape in norms.items()}


def logits(config, parameters, tokens):
    """Return the scores of the next token at each place: (batch, length) -> (batch, length, vocabulary)."""
    shared = {name: parameters[name] for name in ("embedding", "last")}
    stacked = {name: value for name, value in parameters.items() if name not in shared}
    angles = rotations(config, tokens.shape[1])

    def layer(x, own):
        x = x + attention(config, own, norm(config, own["before_attention"], x), angles)
        y = norm(config, own["before_feed_forward"], x)
        return x + (jax.nn.silu(y @ own["gate"]) * (y @ own["up"])) @ own["down"], None

    x, _ = jax.lax.scan(jax.checkpoint(layer), shared["embedding"][tokens], stacked)
    return norm(config, shared["last"], x) @ shared["embedding"].T


def attention(config, own, x, angles):
    """Return causal attention with grouped keys and values."""
    batch, length, width = x.shape
    head = width // config["num_attention_heads"]
    query, key, value = ((x @ own[name]).reshape(batch, length, -1, head) for name in ("query", "key", "value"))
    mixed = jax.nn.dot_product_attention(rotated(query, angles), rotated(key, angles), value, is_causal=True)
    return mixed.reshape(batch, length, width) @ own["output"]


def rotations(config, length):
    """Return the angles of the rotary position embedding: (length, half of a head)."""
    half = config["hidden_size"] // config["num_attention_heads"] // 2
    frequencies = config["rope_theta"] ** (-jnp.arange(half) / half)
    return jnp.arange(length)[:, None] * frequencies


def rotated(x, angles):
    """Rotate the two halves of each head by the angles of its place."""
    first, second = jnp.split(x, 2, axis=-1)
    cosine, sine = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


def norm(config, scale, x):
    """Return the values divided by their root mean square."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + config["rms_norm_eps"]) * scale
