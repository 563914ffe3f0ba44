#!/usr/bin/env bash
# Removes what make made: every lab, its images and cache, .venv/, .build/ and the container engine's process if
# make started it. Packages of the machine stay: others may use them by now.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ ! -x .venv/bin/tpu_ops ]; then
    echo "clean: there is no .venv/, so no lab is looked for (make env makes it)" >&2
elif ! .venv/bin/tpu_ops lab down --all --cache; then
    echo "clean: labs, images or downloads may be left: make env and clean again when a container engine answers" >&2
fi
if [ -r .build/dockerd.pid ]; then
    pid=$(cat .build/dockerd.pid)
    if [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = dockerd ]; then
        if [ "$(id -u)" = 0 ]; then kill "$pid"; else sudo kill "$pid"; fi
        timeout 60 tail --pid="$pid" -f /dev/null
        echo "clean: stopped the dockerd that make had started"
    fi
fi
rm -rf .venv .build .mypy_cache .ruff_cache .pytest_cache .hypothesis .ansible
find . -name __pycache__ -type d -prune -exec rm -rf {} +
