"""A thread that reads for others: answers in order, failures to who asked, and another thread once one was let go."""

import asyncio
import threading

import pytest

from port_agent.facts.reader_thread import ReaderThread
from tests.waiting import until


def test_answers_come_in_order_and_failures_belong_to_who_asked() -> None:
    reader = ReaderThread("test")
    assert not reader.is_alive(), "no thread before the first question"
    first, failure, thread = reader.ask(lambda: 1), reader.ask(lambda: 1 // 0), reader.ask(threading.current_thread)
    assert first.result(60.0) == 1
    with pytest.raises(ZeroDivisionError):
        failure.result(60.0)
    assert thread.result(60.0).daemon, "a hung one is not waited for at exit"
    reader.stop()


def test_one_that_hangs_is_left_behind_and_ends_once_it_is_back() -> None:
    gate, reader = threading.Event(), ReaderThread("test")
    held = reader.ask(lambda: (gate.wait(60.0), threading.current_thread())[1])
    dropped = reader.ask(lambda: 2)
    assert dropped.cancel()
    reader.stop()
    assert reader.ask(lambda: 3).result(60.0) == 3, "another thread answers"
    assert not held.done()
    gate.set()
    thread = held.result(60.0)
    assert until(lambda: not thread.is_alive())
    reader.stop()
    assert until(lambda: not reader.is_alive())


def test_an_answer_that_nobody_in_the_loop_awaits_any_more_harms_nobody() -> None:
    gate, reader = threading.Event(), ReaderThread("test")

    async def leave() -> None:
        asyncio.wrap_future(reader.ask(lambda: gate.wait(60.0))).cancel()

    asyncio.run(leave())
    gate.set()
    assert reader.ask(lambda: 1).result(60.0) == 1
    reader.stop()
