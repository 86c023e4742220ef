"""Signal handlers wait while the interceptor moves storages, as in plain PyTorch they wait for the end of an operator.

Python runs them between any two bytecodes of the main thread. A KeyboardInterrupt between releasing a storage's
memory and marking it as evicted would leave the tensor in neither state. A handler that saves a checkpoint would
find it in that condition.
"""

import signal
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType, TracebackType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


class SignalSafeLock:
    """A reentrant lock; signals that arrive while the main thread holds it are handled when it releases the lock.

    `as_the_program`: context in which handlers run, because they may use tensors like any code of the program.
    """

    def __init__(self, as_the_program: Callable[[], AbstractContextManager[None]]) -> None:
        self._as_the_program = as_the_program
        self._lock = threading.RLock()
        self._waiting: deque[tuple[Handler, int, FrameType | None]] = deque()

    def condition(self) -> threading.Condition:
        """Return a condition of this lock.

        A thread that waits for it does not hold the lock, and signals are handled at once.
        """
        return threading.Condition(self._lock)

    def acquire(self) -> None:
        self._lock.acquire()

    def acquire_within(self, patience_s: float) -> bool:
        """Acquire the lock; return whether that was possible within `patience_s` seconds."""
        return self._lock.acquire(timeout=patience_s)

    def acquire_if_free(self) -> bool:
        """Acquire the lock if no thread holds it, not even this one; return whether it was acquired."""
        return not self._held() and self._lock.acquire(blocking=False)

    def release(self) -> None:
        """Release the lock and run the deferred handlers; raises whatever a handler raises."""
        self._lock.release()
        if self._waiting and threading.current_thread() is threading.main_thread():
            while self._waiting and not self._held():
                self.handle(*self._waiting.popleft())

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _held(self) -> bool:
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]  # as threading.Condition asks it

    def handle(self, handler: Handler, number: int, frame: FrameType | None) -> None:
        """Run a handler now, or as soon as the main thread releases the lock."""
        if self._held():
            self._waiting.append((handler, number, frame))
        else:
            with self._as_the_program():
                handler(number, frame)


class _DeferredHandler:
    """The function that the interpreter calls instead of a program's handler."""

    def __init__(self, lock: SignalSafeLock, handler: Handler) -> None:
        self._lock, self.handler = lock, handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._lock.handle(self.handler, number, frame)


def _own(handler: Any) -> Any:
    return handler.handler if isinstance(handler, _DeferredHandler) else handler


def deferring_signal(original: Callable[..., Any], lock: SignalSafeLock) -> Callable[..., Any]:
    """Return a `signal.signal` whose handlers wait for `lock`."""

    def set_handler(signalnum: int, handler: Any) -> Any:
        return _own(original(signalnum, _DeferredHandler(lock, handler) if callable(handler) else handler))

    return set_handler


def unwrapped_getsignal(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `signal.getsignal` that shows the handlers that the program set."""
    return lambda signalnum: _own(original(signalnum))


def rewrap_handlers() -> None:
    """Set every handler written in Python again, so that it waits if `deferring_signal` is
    installed, and otherwise does not.

    Outside the main thread, where no handler may be set, they stay as they are.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if callable(handler):
            signal.signal(number, _own(handler))
