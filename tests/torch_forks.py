"""Commands of ours as forks of a process that has loaded torch, where a test would start `python -m port_agent...`:
most of what such a command takes.

Within `forks()` (or the fixture `torch_forks`), `subprocess.Popen` has modules of ours run in forks: the same words,
environment, working directory, descriptors, exit code and signals, and a child of the caller as any other (whoever
forks hands it over). Processes that a fork starts are processes, as are workers, whose limits may leave no room for
what a fork brings; with `forks(nested=True)` both are forks. What is said of the start of a process, of what it loads
or takes before its first tensor is no matter for forks: they have all modules, and the allocator, whatever their
environment names. A command that begins again (`execve`) under another environment does so in the same fork.
"""

import atexit
import ctypes
import gc
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import pytest

_ROOT = Path(__file__).parents[1]
_OURS = ("port_agent.", "port_planner.")
_ABOUT_THE_PROCESS = (
    "port_agent.system.",
    "port_agent.malloc.",
    "port_agent.backend.",
    "port_agent.training.",
    "port_agent.finetuning.",
)
"""Modules that limit, measure or examine the process that they begin in."""
_WORKERS = ("port_agent.training.", "port_agent.finetuning.")
"""Of these, those that run in forks with `nested`: what starts them gives them room for what a fork
brings, as it measures one.
"""
_FOLLOWED = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
_INTERPRETER = {name: value for name, value in os.environ.items() if name.startswith("PYTHON")}
"""Variables for the interpreter, as they were where the process that forks begins; with
others, a process is started.
"""
_PRELOADED = (
    "torch._dynamo",  # optimizers import this at their first step
    "port_agent.cli.follow_job",
    "port_agent.cli.plan.command",
    "port_agent.cli.plan.train",
    "port_agent.cli.progress",
    "port_agent.control.peer_exchange",
    "port_agent.energy.sources.registry",
    "port_agent.finetuning.job.finetune_worker",
    "port_agent.foreground.finetune",
    "port_agent.foreground.train",
    "port_agent.intercept.budget",
    "port_agent.planning.plan_making",
    "port_agent.prepare.making.bundle_maker",
    "port_agent.prepare.measurement.within_budget",
    "port_agent.prepare.measurement.measurement_worker",
    "port_agent.prepare.peer_plans",
    "port_agent.prepare.placement.device_watts",
    "port_agent.prepare.referee.process",
    "port_agent.prepare.reference",
    "port_agent.prepare.tiling.choice",
    "port_agent.training.run",
    "port_planner.job_sources",
)
"""What commands and workers import, some of it only where they need it."""
_FLOWERS = ("port_agent.federate.client", "port_agent.federate.round")
"""Modules that import Flower, which need not be installed."""
_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2)."""
_LENGTH = struct.Struct("<I")
_SIGNATURE = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Request:
    """A module to run: its words, surroundings, and the numbers that the descriptors sent along take there."""

    words: list[str]
    folder: str
    environment: dict[str, str]
    places: list[int]
    own_session: bool
    nested: bool

    @property
    def module(self) -> str:
        return self.words[self.words.index("-m") + 1]


class _BeginAgain(BaseException):
    """A command becomes itself, under another environment."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        super().__init__(words)
        self.words, self.environment = list(words), dict(environment)


class ForkedPopen(subprocess.Popen[Any]):
    """As `subprocess.Popen`; a module of ours runs in a fork; with `nested`, so do the modules that it starts."""

    nested = False
    server: "ClassVar[_Server | None]" = None
    """Who forks for this process; None: nobody yet."""

    def _execute_child(self, *arguments: Any) -> None:
        a = _SIGNATURE.bind(self, *arguments).arguments
        request = _request_of(a, self.nested)
        if request is None:
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        sys.audit("subprocess.Popen", sys.executable, request.words, request.folder, None)
        ends = [a["p2cread"], a["c2pwrite"], a["errwrite"]]
        try:
            sent = [place if end == -1 else end for place, end in enumerate(ends)] + list(a["pass_fds"])
            ForkedPopen.server = ForkedPopen.server or _start_server()
            self.pid = ForkedPopen.server.fork(request, sent)
            self._child_created = True
        finally:
            close: Any = self._close_pipe_fds  # type: ignore[attr-defined]
            close(a["p2cread"], a["p2cwrite"], a["c2pread"], a["c2pwrite"], a["errread"], a["errwrite"])


class _Torch:
    """The threads that torch computes with by itself."""

    threads = 1


def _request_of(a: Mapping[str, Any], nested: bool) -> _Request | None:
    """Return what a fork is to do; None where it takes a process."""
    words = [os.fsdecode(word) for word in ([a["args"]] if isinstance(a["args"], str | bytes) else a["args"])]
    environment = dict(os.environ if a["env"] is None else a["env"])
    asked = any(a[name] for name in ("preexec_fn", "startupinfo", "creationflags", "shell", "gids"))
    asked |= any(a[name] is not None for name in ("gid", "uid")) or a["umask"] >= 0 or a["process_group"] > 0
    others = {name: value for name, value in environment.items() if name.startswith("PYTHON")}
    changed = {name for name, _ in others.items() ^ _INTERPRETER.items()} - set(_FOLLOWED)
    if asked or changed or not a["close_fds"] or not _is_ours(words, nested):
        return None
    folder = os.fsdecode(a["cwd"] if a["cwd"] is not None else Path.cwd())
    return _Request(words, folder, environment, [0, 1, 2, *a["pass_fds"]], bool(a["start_new_session"]), nested)


def _is_ours(words: Sequence[str], nested: bool) -> bool:
    """Return whether these words run a module of ours that a fork may run."""
    begin = [word for word in words[:4] if word != "-P"][:3]
    if len(begin) < 3 or begin[0] != sys.executable or begin[1] != "-m":
        return False
    allowed = _WORKERS if nested else ()
    return begin[2].startswith(_OURS) and (not begin[2].startswith(_ABOUT_THE_PROCESS) or begin[2].startswith(allowed))


@contextmanager
def forks(*, nested: bool = False) -> Iterator[None]:
    """Have modules of ours run in forks, where a process would be started for them; with `nested`,
    also those that they start.
    """
    with pytest.MonkeyPatch.context() as patch:
        if sys.platform == "linux":
            patch.setattr(subprocess, "Popen", ForkedPopen)
            patch.setattr(ForkedPopen, "nested", nested)
        yield


class _Server:
    """The process that forks, as this process sees it."""

    def __init__(self, line: socket.socket) -> None:
        self._line, self._lock = line, threading.Lock()

    def fork(self, request: _Request, descriptors: Sequence[int]) -> int:
        """Return the process that does what is asked, a child of this one."""
        content = json.dumps(asdict(request)).encode()
        with self._lock:
            _adopt(True)  # only as long as the process in between may end
            try:
                socket.send_fds(self._line, [_LENGTH.pack(len(content))], list(descriptors))
                self._line.sendall(content)
                answer = self._line.recv(_LENGTH.size)
            finally:
                _adopt(False)
        assert len(answer) == _LENGTH.size, "the process that forks is gone"
        return int(_LENGTH.unpack(answer)[0])

    def end(self) -> None:
        """Have it end, which it does once nobody can ask it any more."""
        self._line.close()


def _start_server() -> _Server:
    """Return the process that forks for this one, which has loaded torch and nothing else."""
    ours, theirs = socket.socketpair()
    with theirs:
        environment = {**os.environ, **_preloaded()}
        environment.pop("PYTHONPATH", None)
        words = [sys.executable, "-m", __name__, str(theirs.fileno())]
        process = subprocess.Popen(words, pass_fds=[theirs.fileno()], cwd=_ROOT, env=environment)
    server = _Server(ours)
    atexit.register(process.wait)
    atexit.register(server.end)
    return server


def _preloaded() -> dict[str, str]:
    from port_agent.malloc import preload_environment

    return preload_environment(None)


def _adopt(on: bool) -> None:
    """Become the parent of processes whose parents end, or no longer."""
    ctypes.CDLL(None).prctl(_SUBREAPER, int(on), 0, 0, 0)


def _serve(line: socket.socket) -> int:
    """Fork for each request; the fork is handed over to whoever asks, and begins once that is done."""
    while True:
        head, descriptors, _, _ = socket.recv_fds(line, _LENGTH.size, 64)
        if not head:
            return 0
        content = line.recv(_LENGTH.unpack(head)[0], socket.MSG_WAITALL)
        request = _Request(**json.loads(content))
        begins, begin = os.pipe()
        number, told = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child == 0:
                os.close(begin)
                os.read(begins, 1)
                _become(request, descriptors)
            os.write(told, _LENGTH.pack(child))
            os._exit(0)
        os.waitpid(between, 0)
        line.sendall(os.read(number, _LENGTH.size))
        for descriptor in (begins, begin, number, told, *descriptors):
            os.close(descriptor)


def _load() -> None:
    """Import what commands of ours import, and compute nothing."""
    import torch

    for module in (*_PRELOADED, *(_FLOWERS if find_spec("flwr") else ())):
        importlib.import_module(module)
    from port_agent.malloc import preload_mode

    preload_mode()
    _Torch.threads = torch.get_num_threads()
    gc.collect()
    gc.freeze()  # a collection in a fork would write into all that it shares


def _become(request: _Request, descriptors: Sequence[int]) -> NoReturn:
    """Run a module as if this were a new process."""
    code = 1
    try:
        atexit._clear()
        if request.own_session:
            os.setsid()
        _place(descriptors, request.places)
        _forget_signals()
        if request.nested:
            fork_from_here()
        os.chdir(request.folder)
        os.execve = _execve  # type: ignore[assignment]
        code = _run(request.words, request.environment)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def fork_from_here() -> None:
    """Have modules of ours that this process starts, workers too, run in forks of it as it is now."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        nothing = os.open(os.devnull, os.O_RDWR)
        _place([nothing, nothing, nothing, theirs.fileno()], [0, 1, 2, 3])
        os._exit(_serve(socket.socket(fileno=3)))
    theirs.close()
    ForkedPopen.server, ForkedPopen.nested = _Server(ours), True
    subprocess.Popen = ForkedPopen  # type: ignore[misc]


def _place(descriptors: Sequence[int], places: Sequence[int]) -> None:
    """Give descriptors the numbers they are to have, and close all others."""
    above = max(*descriptors, *places) + 1
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, above + number)
    for number, place in enumerate(places):
        os.dup2(above + number, place)
    kept = sorted(places)
    for first, last in zip([-1, *kept], [*kept, 1 << 16], strict=True):
        if first + 1 < last:
            os.closerange(first + 1, last)


def _forget_signals() -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGINT}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _execve(path: str, words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Begin again where a module of ours becomes one of ours; as it was, else."""
    if path == sys.executable and _is_ours(list(words), ForkedPopen.nested):
        raise _BeginAgain(words, environment)
    _EXECVE(path, list(words), environment)
    raise AssertionError("it came back")


_EXECVE = os.execve


def _run(words: list[str], environment: Mapping[str, str]) -> int:
    """Return the exit code of a module."""
    while True:
        try:
            _surround(words, environment)
            if not hasattr(sys.modules.get(sys.argv[0]), "__path__"):
                sys.modules.pop(sys.argv[0], None)  # runpy warns of a module that is there already
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        except _BeginAgain as again:
            words, environment = again.words, again.environment
        except SystemExit as ended:
            if isinstance(ended.code, int | None):
                return ended.code or 0
            sys.stderr.write(f"{ended.code}\n")
            return 1
        except KeyboardInterrupt:
            traceback.print_exc()
            sys.stderr.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        else:
            return 0


def _surround(words: list[str], environment: Mapping[str, str]) -> None:
    """Give this process its words, its environment, and what libraries read of that only once."""
    import torch

    from port_agent.malloc import active

    at = words.index("-m")
    sys.orig_argv[:], sys.argv[:] = words, words[at + 1 :]
    entries = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    here = [] if "-P" in words[:at] else [str(Path.cwd())]
    sys.path[:] = [*here, *entries, *_BASE_PATH]
    os.environ.clear()
    os.environ.update(environment)
    threads = environment.get("OMP_NUM_THREADS")
    torch.set_num_threads(int(threads) if threads else _Torch.threads)
    allocator = active()
    if allocator is not None:
        allocator.set_limit(_bytes(environment, "PORT_MALLOC_LIMIT"))
        allocator.set_hard_limit(_bytes(environment, "PORT_MALLOC_HARD_LIMIT"))


def _bytes(environment: Mapping[str, str], name: str) -> int | None:
    return int(environment[name]) if name in environment else None


_BASE_PATH = [entry for entry in sys.path if entry not in ("", str(_ROOT))]

if __name__ == "__main__":
    sys.modules["tests.torch_forks"] = sys.modules["__main__"]
    _load()
    raise SystemExit(_serve(socket.socket(fileno=int(sys.argv[1]))))
