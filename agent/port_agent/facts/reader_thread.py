"""A thread for reads that may hang (a dead bus, a FIFO, a file server that is down), so that the caller does not.

The caller waits for the answer as long as it likes, blocking or in an event loop. It is not a pool thread, because
Python waits for those at exit.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

T = TypeVar("T")
_Questions = queue.SimpleQueue[Callable[[], None] | None]


class ReaderThread:
    """Answers one question after another; its thread starts with the first and ends with
    the process, hanging or not.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._questions: _Questions | None = None
        self._thread: threading.Thread | None = None

    def ask(self, question: Callable[[], T]) -> "Future[T]":
        """Return a future with the answer, or with whatever `question` raises."""
        if self._questions is None:
            self._questions = queue.SimpleQueue()
            self._thread = threading.Thread(target=_run, args=(self._questions,), name=self._name, daemon=True)
            self._thread.start()
        answer: Future[T] = Future()
        self._questions.put(partial(_answer, answer, question))
        return answer

    def is_alive(self) -> bool:
        """Return whether the thread exists, running or hanging."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self) -> None:
        """End the thread; one that hangs ends once its read returns. The next query starts another."""
        if self._questions is not None:
            self._questions.put(None)
            self._questions = None


def _run(questions: _Questions) -> None:
    while (question := questions.get()) is not None:
        question()


def _answer(answer: "Future[T]", question: Callable[[], T]) -> None:
    if not answer.set_running_or_notify_cancel():
        return
    try:
        found = question()
    except Exception as error:  # the exception belongs to the caller
        answer.set_exception(error)
    else:
        answer.set_result(found)
