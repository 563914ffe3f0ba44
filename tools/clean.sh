#!/usr/bin/env bash
# Removes what make made: every lab, its images and cache, .venv/, .build/ and the container engine's process if
# make started it. Packages of the machine stay: others may use them by now.
set -euo pipefail
cd "$(dirname "$0")/.."

state="${TPU_OPS_STATE:-${XDG_STATE_HOME:-$HOME/.local/state}/tpu_ops}"
engine=
for candidate in ${TPU_OPS_ENGINE:-docker podman} ; do
    if command -v "$candidate" >/dev/null && "$candidate" info >/dev/null 2>&1; then
        engine=$candidate
        break
    fi
done
if [ -x .venv/bin/tpu_ops ] && [ -n "$engine" ]; then
    for lab in "$state"/lab/*/; do
        [ -d "$lab" ] || continue
        TPU_OPS_LAB=$(basename "$lab") .venv/bin/tpu_ops lab down
    done
fi
if [ -n "$engine" ]; then
    images=$("$engine" image ls -q --filter label=tpu-ops.lab.image | sort -u)
    # shellcheck disable=SC2086 # one word per image id
    [ -z "$images" ] || "$engine" image rm -f $images >/dev/null
    "$engine" volume rm -f tpu-ops-lab-cache >/dev/null
fi
if [ -r .build/dockerd.pid ]; then
    pid=$(cat .build/dockerd.pid)
    if [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = dockerd ]; then
        kill "$pid"
        tail --pid="$pid" -f /dev/null
        echo "clean: stopped the dockerd that make had started"
    fi
fi
rm -rf .venv .build .mypy_cache .ruff_cache .pytest_cache .hypothesis .ansible
find . -name __pycache__ -type d -prune -exec rm -rf {} +
rmdir "$state/lab" "$state" 2>/dev/null || true
echo "clean: done"
