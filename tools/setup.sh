#!/usr/bin/env bash
# Sets up what this project needs on a machine and prints each step; prints nothing if there is nothing to do.
#
#   tools/setup.sh env      .venv/ from requirements.lock, created by uv
#   tools/setup.sh tools    ssh, rsync and git, which the commands and the fast tests use
#   tools/setup.sh browser  Chromium, in which tests open the pages of reports, where the system has a package of it
#   tools/setup.sh engine   the same as tools, and a running container engine for the lab
#
# Exit codes: 0 ready, 2 something is missing that this script must not or cannot install.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
build="$root/.build"
venv="$root/.venv"
mkdir -p "$build"

say() { printf 'setup: %s\n' "$*" >&2; }
fail() {
    printf 'setup: error: %s\n' "$1" >&2
    [ $# -lt 2 ] || printf '       fix: %s\n' "$2" >&2
    exit 2
}

# uv and pip have their own certificate bundles; behind a TLS-inspecting proxy, only the system's works.
system_ca=/etc/ssl/certs/ca-certificates.crt
if [ -z "${SSL_CERT_FILE:-}" ] && [ -r "$system_ca" ]; then
    export SSL_CERT_FILE="$system_ca"
fi

sudo_cmd=()
if [ "$(id -u)" != 0 ]; then
    sudo_cmd=(sudo)
fi

apt_updated=
apt_update() {
    [ -z "$apt_updated" ] || return 0
    local log="$build/apt.log"
    "${sudo_cmd[@]}" apt-get update -qq >"$log" 2>&1 || {
        tail -n 5 "$log" >&2
        fail "apt-get update failed (log: $log)" "check the network and the apt sources, then run this again"
    }
    apt_updated=1
}

apt_install() {
    command -v apt-get >/dev/null ||
        fail "this machine has no apt-get and lacks: $*" "install these packages with the machine's own package manager"
    [ "$(id -u)" = 0 ] || command -v sudo >/dev/null ||
        fail "installing $* needs root, and sudo is not installed" "run as root, or have an administrator install: $*"
    say "installing packages: $*"
    local log="$build/apt.log"
    apt_update
    "${sudo_cmd[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >"$log" 2>&1 || {
        tail -n 15 "$log" >&2
        fail "apt-get install $* failed (log: $log)" "repair the package system, then run this again"
    }
}

# Prints the path of the newest Python that requires-python accepts; fails if there is none.
find_python() {
    local candidate
    for candidate in python3.14 python3.13 python3.12 python3.11 python3; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    return 1
}

# Prints the path of uv: the machine's own, or one installed below .build/.
find_uv() {
    if command -v uv >/dev/null; then
        command -v uv
        return
    fi
    local own="$build/uv/bin/uv"
    if [ ! -x "$own" ]; then
        command -v python3 >/dev/null || apt_install python3 python3-venv
        python3 -c 'import ensurepip, venv' 2>/dev/null || apt_install python3-venv
        say "installing uv below .build/"
        rm -rf "$build/uv"
        python3 -m venv "$build/uv"
        PIP_CERT="${PIP_CERT:-${SSL_CERT_FILE:-}}" "$build/uv/bin/pip" install -q --disable-pip-version-check uv 2>"$build/pip.log" || {
            tail -n 5 "$build/pip.log" >&2
            rm -rf "$build/uv"
            fail "uv could not be installed from the package index" "check the network (and PIP_CERT, PIP_INDEX_URL), then run this again"
        }
    fi
    printf '%s\n' "$own"
}

# Prints the SHA-256 of standard input; macOS has only shasum.
digest() {
    if command -v sha256sum >/dev/null; then sha256sum; else shasum -a 256; fi | cut -d' ' -f1
}

setup_env() {
    local stamp="$venv/.requirements.sha256" want have=
    want=$(cat "$root/requirements.lock" "$root/pyproject.toml" | digest)
    [ ! -r "$stamp" ] || have=$(cat "$stamp")
    if [ "$want" = "$have" ] && "$venv/bin/python" -c '' 2>/dev/null; then
        return
    fi
    local uv python
    uv=$(find_uv)
    python=$(find_python) || python=3.13
    say "creating .venv/ from requirements.lock"
    rm -f "$stamp"
    "$venv/bin/python" -c '' 2>/dev/null || "$uv" venv -q --clear --python "$python" "$venv"
    "$uv" pip sync -q --python "$venv/bin/python" --require-hashes "$root/requirements.lock"
    "$uv" pip install -q --python "$venv/bin/python" --no-deps --no-build-isolation --editable "$root"
    printf '%s\n' "$want" >"$stamp"
}

# Uses the lab's own search for an engine, so that both always agree.
engine_answers() {
    "$venv/bin/python" -c 'from tpu_ops.lab.engine import find; find()' >/dev/null 2>&1
}

start_dockerd() {
    local log="$build/dockerd.log" job=
    if [ -d /run/systemd/system ]; then
        say "starting the docker service"
        "${sudo_cmd[@]}" systemctl start docker
    else
        say "starting dockerd in the background (log: $log)"
        "${sudo_cmd[@]}" setsid dockerd --pidfile "$build/dockerd.pid" >"$log" 2>&1 </dev/null &
        job=$!
    fi
    local deadline=$((SECONDS + 60))
    until engine_answers; do
        if [ -n "$job" ] && [ ! -d "/proc/$job" ]; then
            tail -n 3 "$log" >&2
            fail "dockerd ended at once (log: $log)" "correct what the log names, or start a container engine by hand; then run this again"
        fi
        if [ "$SECONDS" -ge "$deadline" ]; then
            [ -z "$job" ] || tail -n 10 "$log" >&2
            fail "docker did not answer within 60 s" "start a container engine by hand, then run this again"
        fi
        sleep 0.2 # polls the engine until it answers, ends, or the deadline passes
    done
}

# Installs the packages of missing programs; each argument is PROGRAM:PACKAGE.
install_missing() {
    local missing=() tool
    for tool in "$@"; do
        command -v "${tool%%:*}" >/dev/null || missing+=("${tool##*:}")
    done
    [ ${#missing[@]} = 0 ] || apt_install "${missing[@]}"
}

tools=(ssh:openssh-client rsync:rsync git:git)

setup_tools() {
    install_missing "${tools[@]}"
}

# Ubuntu has Chromium as a snap only. Without it, tests are skipped for a reason that docs/unproved.md has.
setup_browser() {
    local name
    for name in chromium chromium-browser google-chrome chromium-headless-shell; do
        ! command -v "$name" >/dev/null || return 0
    done
    command -v apt-get >/dev/null || return 0
    [ "$(id -u)" = 0 ] || command -v sudo >/dev/null || return 0
    apt-cache policy "$name" | grep -q 'Candidate: [0-9]' || apt_update
    ! apt-cache policy "$name" | grep -q 'Candidate: [0-9]' || apt_install "$name"
}

setup_engine() {
    local needed=("${tools[@]}" ip:iproute2)
    # Without an image registry, the lab builds its worker image with mmdebstrap.
    ! command -v apt-get >/dev/null || needed+=(mmdebstrap:mmdebstrap)
    install_missing "${needed[@]}"
    engine_answers && return
    if [ -n "${TPU_OPS_ENGINE:-}" ]; then
        fail "TPU_OPS_ENGINE is $TPU_OPS_ENGINE, which does not answer" "start it, or unset TPU_OPS_ENGINE"
    fi
    [ "$(id -u)" = 0 ] || command -v sudo >/dev/null ||
        fail "no container engine answers $(id -un), and starting one needs root" \
            "start one as root, or have an administrator add $(id -un) to the group docker"
    # Some machines have a docker client without an engine.
    command -v dockerd >/dev/null || apt_install docker.io
    # Debian 13 has the client in a separate package.
    command -v docker >/dev/null || apt_install docker-cli
    start_dockerd
}

case "${1:-}" in
    env) setup_env ;;
    tools) setup_tools ;;
    browser) setup_browser ;;
    engine) setup_engine ;;
    *) fail "unknown step '${1:-}'" "use: tools/setup.sh env|tools|browser|engine" ;;
esac
