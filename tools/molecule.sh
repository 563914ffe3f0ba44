#!/usr/bin/env bash
# Runs Molecule on workers of the local lab, which all scenarios share: a node of two workers for each release (Debian
# 12 and 13, and Ubuntu 22.04 and 24.04 if an image registry answers). Scenarios for a single worker use the first one
# of each node.
#
#     tools/molecule.sh test                 every scenario of molecule/, site last: it recreates the nodes
#     tools/molecule.sh test -s base         one
#     tools/molecule.sh converge -s base     any other command of Molecule
#     MOLECULE_RELEASE=debian13 tools/molecule.sh test -s base     one release; also ubuntu2004, without JAX
#
# Uses the lab instance TPU_OPS_LAB (default: `molecule`). `test` removes the instance at the end if it had to start it.
# After any other command the instance stays: tools/molecule.sh down removes it.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
export PATH="$root/.venv/bin:$PATH" TPU_OPS_LAB="${TPU_OPS_LAB:-molecule}"
releases=(debian12 debian13 ubuntu2204 ubuntu2404)
[ -z "${MOLECULE_RELEASE:-}" ] || releases=("$MOLECULE_RELEASE")
export MOLECULE_WORKERS="molecule-${MOLECULE_RELEASE:-*}-w0" MOLECULE_NODES="node_molecule_${MOLECULE_RELEASE:-*}"
# The fleet is this clone, independent of the current directory.
export TPU_OPS_FLEET="$root"
logs=$root/.build/molecule/$TPU_OPS_LAB
mkdir -p "$logs"
command=${1:-test}
[ $# -eq 0 ] || shift

if [ "$command" = down ]; then
    exec tpu_ops lab down
fi
scenarios=() options=()
while [ $# -gt 0 ]; do
    if [ "$1" = -s ] && [ $# -gt 1 ]; then
        scenarios+=("$2")
        shift 2
    else
        options+=("$1")
        shift
    fi
done
every=(molecule/*/molecule.yml)
every=("${every[@]#molecule/}")
every=("${every[@]%/molecule.yml}")
for scenario in "${scenarios[@]}"; do
    [ -e "molecule/$scenario/molecule.yml" ] || {
        echo "there is no scenario $scenario; there are: ${every[*]}" >&2
        exit 1
    }
done
if [ "${#scenarios[@]}" -eq 0 ] && [ "$command" = test ]; then
    for scenario in "${every[@]}"; do
        [ "$scenario" = site ] || scenarios+=("$scenario")
    done
    scenarios+=(site)
fi
bare=
if ! tpu_ops lab env >/dev/null 2>&1; then
    [ "$command" != test ] || trap 'tpu_ops lab down' EXIT
    # Remove the rest of an interrupted lab: its workers would not be bare.
    tpu_ops lab down >/dev/null
    tpu_ops lab up >/dev/null
    # Otherwise, Molecule would skip the preparation of the new workers.
    rm -rf "${every[@]/#/$logs/}"
    bare=yes
fi
environment=$(tpu_ops lab env)
eval "$environment"
export TPU_OPS_FLEET="$root"
export MOLECULE_FLEET_INVENTORY="${ANSIBLE_INVENTORY%%,*}" MOLECULE_LAB_INVENTORY="${ANSIBLE_INVENTORY#*,}"
export MOLECULE_ANSIBLE_ARGS_STRICT_MODE=1
export MOLECULE_CHANGES_FILE="$logs/changes"
: >"$MOLECULE_CHANGES_FILE"
# The scenarios' tests import tests/support.
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

# Succeeds if docs/unproved.md has a row for workers of a release, such as ubuntu2204: | Ubuntu workers (22.04, ...
unproved() {
    local distribution=${1%%[0-9]*} version=${1##*[a-z]}
    [ "${#version}" -lt 4 ] || version=${version:0:2}.${version:2}
    grep -i "^| $distribution workers (" docs/unproved.md | cut -d "|" -f 2 | grep -qFw "$version"
}

# Creates missing nodes; with `anew`, recreates existing ones too.
nodes() {
    local release node said reason
    for release in "${releases[@]}"; do
        node=molecule-$release
        if [ "${1:-}" = anew ]; then
            tpu_ops delete "$node" --zone us-central2-b --yes >/dev/null 2>&1 || true
        fi
        said=$(tpu_ops create "$node" --type v4-16 --zone us-central2-b --runtime "lab-$release" 2>&1 >/dev/null) || {
            # Only this failure leaves a release out, unless it is the only one or docs/unproved.md has no row for it.
            reason=$(grep -o "no image registry answers for .*this machine's own archive has no .*" <<<"$said") &&
                [ "${#releases[@]}" -gt 1 ] || { printf '%s\n' "$said" >&2; exit 1; }
            unproved "$release" || {
                echo "$release cannot be tested, and docs/unproved.md has no row for its workers: $reason" >&2
                exit 1
            }
            echo "left out: $release: $reason"
        }
    done
}

# Molecule finds this file by itself only in git clones.
molecule=(molecule --base-config .config/molecule/config.yml)
nodes
if [ "$command" != test ]; then
    # A scenario's state between commands belongs to this clone and this lab. Molecule's default directory is the same
    # for all clones with the same name.
    [ "${#scenarios[@]}" -ne 1 ] || export MOLECULE_EPHEMERAL_DIRECTORY="$logs/${scenarios[0]}"
    exec "${molecule[@]}" "$command" --no-command-borders "${scenarios[@]/#/-s}" "${options[@]}"
fi
# One at a time, since Molecule stops at the first failure.
failed=()
for scenario in "${scenarios[@]}"; do
    # The scenario of all roles needs bare workers, and leaves more on them than other scenarios expect.
    [ "$scenario" != site ] || [ -n "$bare" ] || nodes anew
    bare=
    export MOLECULE_EPHEMERAL_DIRECTORY="$logs/$scenario"
    rm -rf "$MOLECULE_EPHEMERAL_DIRECTORY"
    "${molecule[@]}" test --no-command-borders -s "$scenario" "${options[@]}" 2>&1 | tee "$logs/$scenario.log" || failed+=("$scenario")
done
code=0
python tools/check_changes.py "$MOLECULE_CHANGES_FILE" || code=1
for scenario in "${failed[@]}"; do
    code=1
    echo "scenario $scenario failed; all it printed: ${logs#"$root"/}/$scenario.log"
    grep -E '^\S*(fatal|failed|FAILED|ERROR)\b|^E   ' "$logs/$scenario.log" | cut -c1-1500 | tail -n 20 || true
done
exit "$code"
