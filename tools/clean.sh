#!/usr/bin/env bash
# Removes what make created: every lab, its images and cache, .venv/, .build/ and the container engine's process if make
# started it. Installed packages stay: other programs may use them.
set -euo pipefail
cd "$(dirname "$0")/.."

labs="${TPU_OPS_STATE:-${XDG_STATE_HOME:-$HOME/.local/state}/tpu_ops}/lab"
if [ ! -x .venv/bin/tpu_ops ]; then
    echo "clean: there is no .venv/, so labs are not looked for (make env creates it)" >&2
elif .venv/bin/python -c 'from tpu_ops.lab.engine import find; find()' 2>/dev/null; then
    .venv/bin/tpu_ops lab down --all --cache
elif compgen -G "$labs/*/" >/dev/null; then
    echo "clean: error: there are labs in $labs, but no container engine answers" >&2
    echo "       fix: run make engine, which starts one, then make clean again" >&2
    exit 1
fi
if [ -r .build/dockerd.pid ]; then
    pid=$(cat .build/dockerd.pid)
    if [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = dockerd ]; then
        if [ "$(id -u)" = 0 ]; then kill "$pid"; else sudo kill "$pid"; fi
        if ! timeout 60 tail --pid="$pid" -f /dev/null; then
            echo "clean: error: dockerd (process $pid) does not end" >&2
            echo "       fix: end it by hand, then make clean again" >&2
            exit 1
        fi
        echo "clean: stopped the dockerd that make had started"
    fi
fi
rm -rf .venv .build .mypy_cache .ruff_cache .pytest_cache .hypothesis .ansible
find . -name __pycache__ -type d -prune -exec rm -rf {} +
