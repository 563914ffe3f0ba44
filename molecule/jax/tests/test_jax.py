"""What people find after the role jax: an environment that computes, and holds the same on every worker."""

from __future__ import annotations

import base64
from pathlib import Path

from testinfra.host import Host

from roles.jax.filter_plugins.jax import jax_or_newest

ROOT = Path(__file__).resolve().parents[3]
PYTHON = "/opt/venvs/jax/bin/python"

#: What the first worker of each release holds.
DIGESTS: dict[str, str] = {}


def test_jax_adds_two_arrays(host: Host) -> None:
    script = "import jax.numpy as jnp; print((jnp.arange(3) + jnp.ones(3)).tolist())"
    assert host.check_output(f'JAX_PLATFORMS=cpu {PYTHON} -I -c "{script}"') == "[1.0, 2.0, 3.0]"


def test_the_environment_holds_the_newest_jax_for_the_worker_s_python(host: Host) -> None:
    script = "import sys, jax; print(*sys.version_info[:2], sep='.', end=' '); print(jax.__version__)"
    python, jax = host.check_output(f'{PYTHON} -I -c "{script}"').split()
    assert jax == jax_or_newest("", python)


def test_a_removed_package_is_installed_again(host: Host) -> None:
    assert host.check_output(f"{PYTHON} -I -c 'import opt_einsum; print(opt_einsum.__name__)'") == "opt_einsum"


def test_a_package_that_nobody_lists_is_gone_and_was_not_spread(host: Host) -> None:
    assert "No module named" in host.run(f"{PYTHON} -I -c 'import six'").stderr


def test_training_runs_get_what_the_framework_needs_and_nothing_else(host: Host) -> None:
    file = host.file("/etc/tpu_ops/jax.env")
    # JAX finds its devices by itself.
    assert file.content_string == "# Written by Ansible; changes are lost.\n"
    assert (file.user, file.group, file.mode) == ("root", "root", 0o644)


def test_the_digests_of_two_workers_that_the_role_shows_are_equal(host: Host) -> None:
    source = (ROOT / "tpu_ops/protocol/installed_packages.py").read_text()
    source += "print(digest(python_version('/opt/venvs/jax'), packages('/opt/venvs/jax')))\n"
    packed = base64.b64encode(source.encode()).decode()
    found = host.check_output(f"echo {packed} | base64 -d | /usr/bin/python3 -I -")
    assert len(found) == 12
    # For another Python the index has other versions.
    assert DIGESTS.setdefault(host.system_info.release, found) == found
