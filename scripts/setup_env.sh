# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
# Sourced by the other scripts: `setup_env [EXTRA]` sets RUN_PYTHON to an interpreter with all
# requirements of pyproject.toml, and creates .venv if there is none. Nothing is installed twice,
# and without an installation there is no network access.
# Expects the working directory to be the repository's root. PYTHON selects the interpreter.

fail() {
    echo "error: $*" >&2
    exit 1
}

python_is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1
}

# The interpreter of an activated environment (`python3`) first, then the newest version.
find_base_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python python3.13 python3.12 python3.11 python3.10}; do
        if python_is_new_enough "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

stamp_of() {
    "$1" - "$2" <<'PY'
import hashlib, pathlib, sys
text = pathlib.Path("pyproject.toml").read_bytes() + sys.argv[1].encode()
print(".venv/.installed-" + hashlib.sha256(text).hexdigest()[:16])
PY
}

# Only one process installs; the others wait. The lock of a dead process is removed.
lock_venv() {
    local owner nameless=0
    until mkdir .venv.lock 2>/dev/null; do
        owner=$(cat .venv.lock/pid 2>/dev/null || true)
        [ -n "$owner" ] || nameless=$((nameless + 1))
        if [ "$nameless" -gt 10 ] || { [ -n "$owner" ] && ! kill -0 "$owner" 2>/dev/null; }; then
            rm -rf .venv.lock
        else
            sleep 1
        fi
    done
    echo $$ >.venv.lock/pid
    trap 'rm -rf .venv.lock' EXIT
}

unlock_venv() {
    rm -rf .venv.lock
    trap - EXIT
}

install_venv() {
    local base=$1 extra=$2 target=.
    [ -n "$extra" ] && target=".[$extra]"
    if [ ! -x .venv/bin/python ]; then
        echo "Setting up .venv with $("$base" -V) (once; some minutes)"
        "$base" -m venv .venv >/dev/null || {
            rm -rf .venv
            fail "$base cannot create a virtual environment; on Debian and Ubuntu: apt install python3-venv"
        }
    elif ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        # Its creation was interrupted.
        "$base" -m venv .venv >/dev/null || fail "cannot repair .venv; remove it and try again"
    fi
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -e "$target" ||
        fail "pip could not install the dependencies of pyproject.toml into .venv"
}

setup_env() {
    local extra=${1:-} base candidate stamp
    base=$(find_base_python) ||
        fail "no Python >= 3.10 found${PYTHON:+ at $PYTHON}; name one, e.g. PYTHON=python3.12 $0"
    # PYTHON first, then .venv, then the shell's interpreter.
    for candidate in ${PYTHON:+"$base"} .venv/bin/python "$base"; do
        if [ -x "$candidate" ] && "$candidate" scripts/check_env.py $extra >/dev/null 2>&1; then
            RUN_PYTHON=$candidate
            return
        fi
    done
    stamp=$(stamp_of "$base" "$extra")
    if [ ! -e "$stamp" ]; then
        lock_venv
        # Another process may have installed while this one waited.
        if [ ! -e "$stamp" ]; then
            install_venv "$base" "$extra"
            touch "$stamp"
        fi
        unlock_venv
    fi
    RUN_PYTHON=.venv/bin/python
}
