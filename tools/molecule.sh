#!/usr/bin/env bash
# Runs Molecule on two workers of the local lab, which all scenarios share:
#
#     tools/molecule.sh test                 every scenario of molecule/, site first: it starts on bare workers
#     tools/molecule.sh test -s base         one
#     tools/molecule.sh converge -s base     any other command of Molecule
#
# Uses the lab instance TPU_OPS_LAB (`molecule` when unset). After `test`, an instance that this script had to bring up is
# taken down; one that was up before stays, and so does everything after any other command: tools/molecule.sh down.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
export PATH="$root/.venv/bin:$PATH" TPU_OPS_LAB="${TPU_OPS_LAB:-molecule}" MOLECULE_NODE=molecule
# The fleet is this clone, wherever it is run from.
export TPU_OPS_FLEET="$root"
mkdir -p "$root/.build"
command=${1:-test}
[ $# -eq 0 ] || shift

if [ "$command" = down ]; then
    exec tpu_ops lab down
fi
# A bare node is what the scenario of all roles starts on.
scenarios=("$@")
if [ "$command" = test ] && [ $# -eq 0 ]; then
    for scenario in molecule/*/molecule.yml; do
        name=$(basename "$(dirname "$scenario")")
        [ "$name" = site ] || scenarios+=(-s "$name")
    done
    scenarios=(-s site "${scenarios[@]}")
fi
if ! tpu_ops lab env >/dev/null 2>&1; then
    tpu_ops lab up >/dev/null
    [ "$command" != test ] || trap 'tpu_ops lab down' EXIT
fi
environment=$(tpu_ops lab env)
eval "$environment"
export TPU_OPS_FLEET="$root"
export MOLECULE_FLEET_INVENTORY="${ANSIBLE_INVENTORY%%,*}" MOLECULE_LAB_INVENTORY="${ANSIBLE_INVENTORY#*,}"
export MOLECULE_ANSIBLE_ARGS_STRICT_MODE=1
MOLECULE_CHANGES_FILE=$(mktemp "$root/.build/molecule-changes.XXXXXX")
export MOLECULE_CHANGES_FILE
# The scenarios' tests use a part of tests/support.
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

if [ "$command" = test ] && [[ " ${scenarios[*]} " == *" -s site "* ]]; then
    tpu_ops delete "$MOLECULE_NODE" --zone us-central2-b --yes >/dev/null 2>&1 || true
fi
tpu_ops create "$MOLECULE_NODE" --type v4-16 --zone us-central2-b >/dev/null
# Named, since Molecule finds it in git clones only.
molecule=(molecule --base-config .config/molecule/config.yml)
if [ "$command" = test ]; then
    # Else Molecule remembers that it has prepared workers that are gone.
    "${molecule[@]}" reset "${scenarios[@]}" >/dev/null 2>&1
fi
code=0
"${molecule[@]}" "$command" --no-command-borders "${scenarios[@]}" || code=$?
if [ "$command" = test ]; then
    python tools/check_changes.py "$MOLECULE_CHANGES_FILE" || code=1
fi
rm -f "$MOLECULE_CHANGES_FILE"
exit "$code"
