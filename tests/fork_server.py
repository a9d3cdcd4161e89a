# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Starts Python programs by fork from a process that has imported torch, torchtitan and ours.

What is different from a true start (``Process(truly=True)`` in `tests/integration/runs.py`): a
program starts in milliseconds, with modules imported already and a copy of its parent's memory. Its
id, session, signals, environment and files are its own, and `subprocess.Popen` in it forks, too.
"""

import atexit
import faulthandler
import gc
import importlib
import inspect
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
AVAILABLE = sys.platform == "linux"  # elsewhere a fork of what torch has loaded is not safe

_PRELOAD = (
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "torch.profiler",
    "torchtitan_lr.launch.ranks",
    "torchtitan_lr.launch.launcher",
    "torchtitan_lr.hf.export",
    "torchtitan_lr.train",
    "transformers.models.llama",
)
_MESSAGE_BYTES = 1 << 18


class ForkServer:
    """The process from which programs are forked; it ends with the one that made it."""

    def __init__(self):
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._keepers = weakref.WeakSet()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fork_server", str(theirs.fileno())],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def start(self, command, cwd, env, stdout, stderr, ignored=()):
        """Starts ``[sys.executable, ...]``."""
        assert command[0] == sys.executable, command
        request = {"arguments": command[1:], "cwd": str(cwd), "env": env, "ignored": list(ignored)}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, self._lock:
            descriptors = [theirs.fileno(), stdout, stderr]
            socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
            self._keepers.add(ours)
        return Forked(ours)

    def close(self):
        for keeper in list(self._keepers):  # of programs that a failed test has not waited for
            keeper.close()
        self._control.close()
        self._process.wait()


class Forked:
    """A started program, in part of `subprocess.Popen`'s terms."""

    def __init__(self, keeper):
        self._keeper = keeper
        self.returncode = None
        self.pid = self._receive()

    def _receive(self):
        data = self._keeper.recv(64)
        assert data, "the fork server is gone; its stderr says why"
        return int(data)

    def poll(self):
        if self.returncode is None and select.select([self._keeper], [], [], 0)[0]:
            self.returncode = self._receive()
        return self.returncode

    def wait(self, timeout=None):
        if self.returncode is None:
            if not select.select([self._keeper], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked program", timeout)
            self.poll()
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)


def serve(control):
    """Forks every program that is requested, until the requesting process has ended."""
    for name in _PRELOAD:
        importlib.import_module(name)
    assert threading.active_count() == 1, threading.enumerate()
    # A signal from the terminal is for the programs; this process ends with the tests'.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keepers = set()
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 3)
        keepers -= {pid for pid in keepers if os.waitpid(pid, 0 if not data else os.WNOHANG)[0]}
        if not data:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            try:
                _keep(json.loads(data), descriptors)
            finally:
                os._exit(255)
        keepers.add(pid)
        for descriptor in descriptors:
            os.close(descriptor)


def _keep(request, descriptors):
    """Starts a program as a child of this process, and tells its id and then its exit status."""
    report, stdout, stderr = descriptors
    pid = os.fork()
    if pid == 0:
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            ignored = number in request["ignored"]
            signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
        _become(request["arguments"], request["cwd"], request["env"], (-1, stdout, stderr))
    os.close(stdout)
    os.close(stderr)
    with socket.socket(fileno=report) as tests:
        tests.send(str(pid).encode())
        # They hang up when they have ended; then no process waits for the program.
        ended = os.pidfd_open(pid)
        if ended not in select.select([tests, ended], [], [])[0]:
            os.kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        tests.send(str(status).encode())
    os._exit(0)


def _become(arguments, cwd, env, files, keep=()):
    """Makes this fresh fork the program; never returns."""
    status = 255
    try:
        if (corpus := sys.modules.get("torchtitan_lr.data.corpus")) is not None:
            corpus.Corpus.shard.cache_clear()  # a program of its own has none of its parent's files
        for number, descriptor in enumerate(files):
            if descriptor != -1:
                os.dup2(descriptor, number)
        _close_others({0, 1, 2, *keep})
        if cwd is not None:
            os.chdir(cwd)
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        unbuffered = arguments[0] == "-u"  # as torchrun starts its ranks
        _forget_parent(unbuffered or bool(os.environ.get("PYTHONUNBUFFERED")))
        _take_signals()
        status = _run(arguments[unbuffered:])
        if status == -signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        os._exit(status & 0xFF)


def _close_others(keep):
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in keep:
            # The listing's own is closed by now.
            try:
                os.close(descriptor)
            except OSError:
                continue


def _forget_parent(unbuffered):
    """Drops what a new interpreter would not know."""
    # What the parent still refers to, it may have to close: here the numbers mean other files.
    gc.freeze()
    # The parent's folders and files are not this process's to delete at its end.
    atexit._clear()
    weakref.finalize._registry.clear()
    weakref.finalize._registered_with_atexit = False
    threading._threading_atexits.clear()
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    if futures := sys.modules.get("concurrent.futures.thread"):
        threading._register_atexit(futures._python_exit)  # else the end waits for idle threads
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        raw = open(descriptor, "wb", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(
            raw,
            encoding="utf-8",
            errors="strict" if name == "stdout" else "backslashreplace",
            line_buffering=not unbuffered and (name == "stderr" or raw.isatty()),
            write_through=unbuffered,
        )
        _KEPT.append(getattr(sys, name))  # its end would write what the parent had buffered
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    import torch

    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or cores))


def _take_signals():
    """Leaves signals as a new interpreter does: what is ignored is inherited, no handler is."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # as Python does
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _run(arguments):
    """Runs a module or script as ``__main__`` and returns the exit status, negative for SIGINT."""
    subprocess.Popen._execute_child = _execute_child
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    _name_frames()
    importlib.invalidate_caches()
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    status = 0
    try:
        if arguments[0] == "-m":
            sys.argv, sys.path = arguments[1:], [os.getcwd(), *entries, *_BASE_PATH]
            for name in (arguments[1], f"{arguments[1]}.__main__"):
                if not hasattr(sys.modules.get(name), "__path__"):
                    sys.modules.pop(name, None)  # it is to run, not to be found
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path = arguments, [os.path.dirname(arguments[0]), *entries, *_BASE_PATH]
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if status and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(*sys.exc_info())
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _name_frames():
    """Tells `inspect` the modules of the frames below, for which torchrun asks all the time."""
    # For a module that `sys.modules` has not under its own name it goes through thousands.
    frame = sys._getframe()
    while frame is not None:
        inspect.modulesbyfile.setdefault(frame.f_code.co_filename, frame.f_globals["__name__"])
        frame = frame.f_back


def _execute_child(process, *values):
    """Stands for `subprocess.Popen._execute_child`: forks Python programs, executes all others."""
    call = inspect.signature(_EXEC).bind(process, *values).arguments
    arguments = call["args"]
    python = isinstance(arguments, (list, tuple)) and arguments[0] == sys.executable
    # A rank has threads of gloo: what it starts is a matter for a true start.
    if not python or arguments[1] == "-c" or call["shell"] or "RANK" in os.environ:
        return _EXEC(process, *values)
    pipes = [call[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite")]
    pipes += [call["errread"], call["errwrite"]]
    sys.stdout.flush()
    sys.stderr.flush()
    # No signal meets the child while it has its parent's handlers.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    process.pid = os.fork()
    if process.pid == 0:
        try:
            if call["start_new_session"]:
                os.setsid()
            if call["preexec_fn"]:
                call["preexec_fn"]()
            command = [os.fspath(argument) for argument in arguments[1:]]
            files = (pipes[0], pipes[3], pipes[5])
            _become(command, call["cwd"], call["env"], files, call["pass_fds"])
        finally:
            os._exit(255)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    process._child_created = True
    process._close_pipe_fds(*pipes)
    return None


_EXEC = subprocess.Popen._execute_child
_KEPT = []
_BASE_PATH = [entry for entry in sys.path[1:] if entry != str(ROOT)]

if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
