# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
# Sourced by the other scripts: `setup_env [EXTRA]` sets RUN_PYTHON to an interpreter with all
# requirements of pyproject.toml. It installs only if none has them: into .venv, which it creates if
# needed, what is missing there. A torch that is there is never replaced.
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
    if [ -n "${PYTHON:-}" ]; then
        set -- "$PYTHON" # may have spaces
    else
        set -- python3 python python3.13 python3.12 python3.11 python3.10
    fi
    for candidate in "$@"; do
        if python_is_new_enough "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

# Only one process installs, on all machines that share the folder; the others wait. The owner
# writes a growing number every second. A lock whose number stands still for a minute, or whose
# process on this machine is gone, belongs to nobody.
lock_venv() {
    local beat seen="" quiet=0 host owner
    host=$(uname -n)
    until mkdir .venv.lock 2>/dev/null; do
        beat=$(cat .venv.lock/beat 2>/dev/null || echo unknown)
        owner=${beat#"$host "}
        quiet=$((quiet + 1))
        [ "$beat" = "$seen" ] || quiet=0
        # On this machine the process can be looked up.
        if [ "$quiet" -ge 60 ] ||
            { [ "$quiet" -ge 3 ] && [ "$owner" != "$beat" ] && ! kill -0 "${owner% *}" 2>/dev/null; }; then
            rm -rf .venv.lock
            continue
        fi
        [ -n "$seen" ] || echo "Waiting: another process installs into .venv (${beat% *})"
        seen=$beat
        sleep 1
    done
    beat=0
    echo "$host $$ $beat" >.venv.lock/beat
    while sleep 1 && kill -0 $$ 2>/dev/null; do
        beat=$((beat + 1))
        echo "$host $$ $beat" >.venv.lock/beat
    done >/dev/null 2>&1 </dev/null &
    beater=$!
    trap unlock_venv EXIT
}

unlock_venv() {
    kill "$beater" 2>/dev/null || true
    wait "$beater" 2>/dev/null || true
    rm -rf .venv.lock
    trap - EXIT
}

installed_torch() {
    .venv/bin/python -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null
}

# The newest torch has no CPU wheel; its CUDA libraries are gigabytes. A torch of your own: install
# it into .venv first.
CPU_TORCH=2.13.0

install_venv() {
    local base=$1 extra=$2 target=. torch
    [ -n "$extra" ] && target=".[$extra]"
    if [ ! -x .venv/bin/python ]; then
        echo "Setting up .venv with $("$base" -V) (once; some minutes)"
        "$base" -m venv .venv >/dev/null || {
            rm -rf .venv
            fail "$base cannot create a virtual environment; on Debian and Ubuntu: apt install python3-venv"
        }
        # The pip of an older Python takes half a minute longer to choose versions.
        .venv/bin/python -m pip install --quiet --retries 0 --timeout 20 --upgrade pip \
            >/dev/null 2>&1 || true
    else
        echo "Installing into .venv. $(.venv/bin/python scripts/check_env.py $extra 2>&1)"
        # Its creation may have been interrupted.
        .venv/bin/python -m pip --version >/dev/null 2>&1 || "$base" -m venv .venv >/dev/null ||
            fail "cannot repair .venv; remove it and try again"
    fi
    # Python compiles a module when it is first imported; all of them take pip a minute.
    set -- .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile
    torch=$(installed_torch) || torch=
    if [ -z "$torch" ] && [ "$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null; then
        echo "No NVIDIA GPU here: torch $CPU_TORCH for the CPU"
        torch=$CPU_TORCH
        "$@" --no-deps --retries 0 --timeout 20 "torch==$torch" \
            --index-url https://download.pytorch.org/whl/cpu >/dev/null 2>&1 ||
            echo "download.pytorch.org cannot be reached: taking torch from pip's own index (a build" \
                "for GPUs: about 5.4 GB with its libraries)"
    fi
    [ -z "$torch" ] || echo "torch==$torch" >.venv/constraints.txt
    # setuptools warns of every editable installation.
    PYTHONWARNINGS=ignore "$@" ${torch:+-c .venv/constraints.txt} -e "$target" ||
        fail "pip could not install the dependencies of pyproject.toml into .venv"
}

setup_env() {
    local extra=${1:-} base candidate status=1
    base=$(find_base_python) ||
        fail "no Python >= 3.10 found${PYTHON:+ at $PYTHON}; name one, e.g. PYTHON=python3.12 $0"
    # PYTHON first, then .venv, then the shell's interpreter.
    for candidate in ${PYTHON:+"$base"} .venv/bin/python "$base"; do
        if [ -x "$candidate" ] && "$candidate" scripts/check_env.py $extra >/dev/null 2>&1; then
            RUN_PYTHON=$candidate
            return
        fi
    done
    lock_venv
    RUN_PYTHON=.venv/bin/python
    # Another process may have installed while this one waited.
    if [ -x $RUN_PYTHON ]; then
        status=0
        $RUN_PYTHON scripts/check_env.py $extra >/dev/null 2>&1 || status=$?
        [ $status -ne 3 ] || fail "$($RUN_PYTHON scripts/check_env.py $extra)"
    fi
    if [ $status -ne 0 ]; then
        install_venv "$base" "$extra"
        $RUN_PYTHON scripts/check_env.py $extra || fail "the installation into .venv is not complete"
    fi
    unlock_venv
}
