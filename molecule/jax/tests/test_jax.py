"""What people find after the role jax: an environment that computes, and holds the same on every worker."""

from __future__ import annotations

from testinfra.host import Host

PYTHON = "/opt/venvs/jax/bin/python"

#: What the first worker of each release holds.
LISTINGS: dict[str, str] = {}


def test_jax_adds_two_arrays(host: Host) -> None:
    script = "import jax.numpy as jnp; print((jnp.arange(3) + jnp.ones(3)).tolist())"
    assert host.check_output(f'JAX_PLATFORMS=cpu {PYTHON} -I -c "{script}"') == "[1.0, 2.0, 3.0]"


def test_what_was_removed_is_there(host: Host) -> None:
    assert host.check_output(f"{PYTHON} -I -c 'import opt_einsum; print(opt_einsum.__name__)'") == "opt_einsum"


def test_two_workers_hold_the_same(host: Host) -> None:
    # For another Python the index has other versions.
    listing = host.check_output("cd /opt/venvs/jax/lib && ls -d python3*/site-packages/*.dist-info")
    assert LISTINGS.setdefault(host.system_info.release, listing) == listing
