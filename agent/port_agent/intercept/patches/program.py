"""Watch the user's program outside its operators: ends of steps, threads, forks, and refused features."""

import _thread
import contextlib
import functools
import inspect
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures.thread import _WorkItem
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from port_agent.intercept.dispatch.mode import FollowMode, Interceptor, following
from port_agent.intercept.dispatch.signals import deferring_signal, rewrap_handlers, unwrapped_getsignal
from port_agent.intercept.dispatch.values_alone import compute_values_alone
from port_agent.intercept.patches.lightning_saving import ATOMIC_SAVE, MODULES, saving_as_stream
from port_agent.intercept.patches.whole_nodes import running_whole
from port_agent.intercept.residency import dispatch_keys
from port_agent.intercept.residency.refusals import unsupported
from port_planner.torch_compat.autograd import ENGINE
from port_planner.torch_compat.loading import CALLBACK, compiler_frames, compiler_of, compiling_disabled
from port_planner.torch_compat.modes import current_modes
from port_planner.torch_compat.tensors import POINTER_READS, SCRIPT_SAVES

_SAME_BITS_BACKEND = "aot_eager"
"""The backend whose programs were compared. inductor generates kernels, and the last digits of eager's
traced optimizer steps differ.
"""


class _MakingWayForCode(MetaPathFinder):
    """A finder that finds nothing: for each module that a program imports, it evicts tensors to make
    space for the modules before.

    A compiler's are 100 MiB.
    """

    def __init__(self, interceptor: Interceptor) -> None:
        self._interceptor = interceptor

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return None, as a finder that does not know the module."""
        self._interceptor.make_way()
        return None


class ProgramHooks:
    """Hooks into torch and threading while a program runs under a budget."""

    def __init__(self, interceptor: Interceptor, *, guarded: bool) -> None:
        """`guarded`: whether memory is guarded, so that nothing has to be refused or made resident for its sake."""
        self._interceptor, self._guarded = interceptor, guarded
        self._undo: list[Callable[[], None]] = []
        self._undo_reads: list[Callable[[], None]] = []
        """Undo functions of hooks that are needed only while results may be dropped and recomputed."""
        self._to_stream = set(MODULES)
        """Modules that save checkpoints and have not been seen yet."""
        self._accumulates = False
        """Whether a backward() or an optimizer has ended a segment; from then on, computing a gradient
        by itself does not end one.
        """

    def install(self) -> None:
        """Install every hook."""
        self._undo.append(register_optimizer_step_post_hook(self._optimizer_stepped).remove)
        self._replace(torch.autograd, ENGINE, self._around_backward)
        self._replace(threading.Thread, "start", self._start_followed)
        self._replace(_thread, "start_new_thread", self._start_bare_followed)
        self._replace(_WorkItem, "run", self._work_followed)
        if self._guarded:
            self._replace(torch, "compile", self._compile_aside)
            self._replace(torch.UntypedStorage, "from_file", self._expecting_pages)
            hooks, self._undo = self._undo, []
            for owner, name in POINTER_READS:
                self._replace(owner, name, self._paged_from_here)
            self._undo_reads, self._undo = self._undo, hooks
        else:
            self._replace(torch, "compile", _refuse_compile)
            for owner, name in SCRIPT_SAVES:
                self._replace(owner, name, self._around_script_save)
        frames = compiler_frames()
        if frames is not None:  # something may have been compiled before
            self._replace(frames, CALLBACK, self._run_compiled_aside if self._guarded else _refuse_compiled)
        finder = _MakingWayForCode(self._interceptor)
        sys.meta_path.insert(0, finder)
        self._undo.append(lambda: sys.meta_path.remove(finder))
        dispatch_keys.start()
        self._undo.append(compute_values_alone())
        self._replace(torch, "set_autocast_enabled", dispatch_keys.watching_autocast)
        self._undo.append(rewrap_handlers)
        self._replace(signal, "getsignal", unwrapped_getsignal)
        self._replace(signal, "signal", lambda original: deferring_signal(original, self._interceptor.lock))
        rewrap_handlers()

    def remove(self) -> None:
        """Remove every hook."""
        for undo in (self._undo_reads, self._undo):
            while undo:
                undo.pop()()

    def _stand_aside(self) -> None:
        self._interceptor.stand_aside()
        while self._undo_reads:
            self._undo_reads.pop()()

    def _replace(self, owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        original = getattr(owner, name)
        replaced = functools.wraps(original)(around(original))
        static = isinstance(owner, type) and isinstance(inspect.getattr_static(owner, name), staticmethod)
        setattr(owner, name, staticmethod(replaced) if static else replaced)

        def undo() -> None:
            if getattr(owner, name) is replaced:
                setattr(owner, name, staticmethod(original) if static else original)

        self._undo.append(undo)

    def _optimizer_stepped(self, *_: Any) -> None:
        for name in self._to_stream & sys.modules.keys():  # a program may have loaded it since
            self._to_stream.remove(name)
            self._replace(sys.modules[name], ATOMIC_SAVE, saving_as_stream)
        self._accumulates = True
        self._interceptor.end_segment(stepped=True)

    def _around_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            accumulates = bool(kwargs.get("accumulate_grad"))
            interceptor = self._interceptor
            interceptor.backwards += 1
            try:
                with running_whole(interceptor, args[0]):
                    return original(*args, **kwargs)
            finally:
                interceptor.backwards -= 1
                if interceptor.backwards == 0 and (accumulates or not self._accumulates):
                    self._accumulates = self._accumulates or accumulates
                    interceptor.end_segment()

        return backward

    def _around_script_save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Make everything resident while C++ writes a scripted or traced module, whose tensors only C++ knows."""

        def save(*args: Any, **kwargs: Any) -> Any:
            interceptor = self._interceptor
            with contextlib.ExitStack() as stack:
                stack.enter_context(interceptor.lock)
                alive = [(storage, memory) for storage in interceptor.table if (memory := storage.ref()) is not None]
                if sum(storage.nbytes for storage, _ in alive) > interceptor.residency.limit_bytes:
                    raise unsupported(
                        "torch.jit writes modules past the operators, and not all tensors fit into the budget together",
                        "save the module after the budget, or its state_dict with torch.save",
                    )
                for storage, _ in alive:
                    stack.enter_context(interceptor.reading(storage))
                return original(*args, **kwargs)

        return save

    def _compile_aside(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Stop intercepting once a program compiles, because under a mode its compiled parts would run as
        if they were not compiled.
        """

        def compiled(model: Any = None, **options: Any) -> Any:
            if not options.get("disable") and not _compiles_nothing():
                self._stand_aside()
            return original(model, **options)

        return compiled

    def _run_compiled_aside(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def callback_from_stance(callback: Any) -> Any:
            if callback and not _compiles_nothing():
                self._stand_aside()
            return original(callback)

        return callback_from_stance

    def _expecting_pages(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Intercept operators before they read a mapped file that may not fit, because its pages are
        loaded without an allocation.
        """

        def from_file(filename: str, shared: bool = False, nbytes: int = 0) -> Any:
            self._interceptor.expect_pages(nbytes)
            return original(filename, shared, nbytes)

        return from_file

    def _paged_from_here(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Recompute a dropped storage when a pointer to it is handed out, and page it from now on.

        Nothing relies on this: any other access to a dropped storage ends the program with an error.
        """

        def read(*args: Any, **kwargs: Any) -> Any:
            self._interceptor.page_from_here(args)
            return original(*args, **kwargs)

        return read

    def _start_followed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Intercept a thread from its start, whatever it does; `threading.Timer` and others have their own run()."""

        def start(thread: threading.Thread) -> None:
            thread.run = functools.partial(self._followed, thread.run)  # type: ignore[method-assign]
            original(thread)

        return start

    def _start_bare_followed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Intercept a thread that is started by `_thread`, below `threading`, too."""

        def start(run: Callable[..., object], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> int:
            if not callable(run):
                return int(original(run, args))  # which says what is wrong
            return int(original(self._followed, (functools.partial(run, *args, **(kwargs or {})),)))

        return start

    def _work_followed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Intercept the work of a pool whose threads were started before the budget."""

        def run(item: Any, *args: Any) -> None:
            if any(isinstance(mode, FollowMode) for mode in current_modes()):
                original(item, *args)
            else:
                self._followed(functools.partial(original, item, *args))

        return run

    def _followed(self, run: Callable[[], object]) -> None:
        with following(self._interceptor):
            run()


def _refuse_compile(original: Callable[..., Any]) -> Callable[..., Any]:
    def compiled(model: Any = None, **options: Any) -> Any:
        if not options.get("disable"):
            _check_backend(options.get("backend", "inductor"))
        return original(model, **options)

    return compiled


def _refuse_compiled(original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse calls of functions that were compiled before the budget, because a dispatch mode would run
    them as if they were not.
    """

    def callback_from_stance(callback: Any) -> Any:
        if callback:
            _check_backend(compiler_of(callback))
        return original(callback)

    return callback_from_stance


def _check_backend(backend: Any) -> None:
    """Raise UnsupportedError unless this backend of torch.compile gives the bits of plain operators."""
    if backend != _SAME_BITS_BACKEND and not _compiles_nothing():
        raise unsupported(
            f"torch.compile(backend={backend!r}) gives other numbers than the operators one by one, and only those can "
            "be intercepted",
            "remove torch.compile, or run the program as it is with TORCH_COMPILE_DISABLE=1 in its environment",
        )


def _compiles_nothing() -> bool:
    """Return whether torch.compile does nothing because the user requested that in the environment."""
    disabled = compiling_disabled()
    if disabled is None:
        disabled = os.environ.get("TORCH_COMPILE_DISABLE") == "1"
    return disabled or os.environ.get("TORCHDYNAMO_DISABLE") == "1"
