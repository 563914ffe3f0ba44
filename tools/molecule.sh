#!/usr/bin/env bash
# Runs Molecule on workers of the local lab: tools/molecule.sh test -s site
#
# Uses the lab instance TPU_OPS_LAB (`molecule` when unset). An instance that this script had to bring up is taken down
# after `test` and `destroy`; one that was up before stays.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
export PATH="$root/.venv/bin:$PATH" TPU_OPS_LAB="${TPU_OPS_LAB:-molecule}"
own="$root/.build/molecule-lab-$TPU_OPS_LAB"
mkdir -p "$root/.build"

if ! tpu_ops lab env >/dev/null 2>&1; then
    touch "$own"
    tpu_ops lab up >/dev/null
fi
case "${1:-}" in
    test | destroy)
        # A test that is told to keep its workers keeps their lab.
        [[ " $* " =~ \ --destroy[=\ ]never\  ]] || trap 'if [ -e "$own" ]; then tpu_ops lab down && rm -f "$own"; fi' EXIT
        ;;
esac
# The fleet is this clone, wherever it is run from.
export TPU_OPS_FLEET="$root"
environment=$(tpu_ops lab env)
eval "$environment"
export MOLECULE_FLEET_INVENTORY="${ANSIBLE_INVENTORY%%,*}" MOLECULE_LAB_INVENTORY="${ANSIBLE_INVENTORY#*,}"
# create and destroy work on the API: they need no inventory, and find none before there is a node.
export MOLECULE_ANSIBLE_ARGS_STRICT_MODE=1
molecule "$@"
