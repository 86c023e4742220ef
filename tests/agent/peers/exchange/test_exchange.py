"""Questions and answers over real TLS links: whole, refused, withdrawn, late, too long, out of order."""

import asyncio
import gc
import os
import random
import tracemalloc
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from port_agent.peers.connection.link import LinkClosedError, PeerLink
from port_agent.peers.connection.messages import (
    ANSWER_LIMIT_BYTES,
    CHUNK_BYTES,
    AnswerChunk,
    AnswerKind,
    PeerAnswer,
    PeerMessage,
    PeerQuestion,
    QuestionChunk,
    Withdrawal,
    own_hello,
)
from port_agent.peers.exchange import answers as answers_module
from port_agent.peers.exchange import exchange as exchange_module
from port_agent.peers.exchange.answers import NotAnsweredError, PeerClient, Topic
from port_agent.peers.exchange.exchange import MAX_COUNTED, Exchange, ExchangeError
from tests.agent.live_daemon import until
from tests.agent.peers.devices import Contents, linked

NAME = "ab" * 32
ONE, TWO = PeerClient("one", "1"), PeerClient("two", "2")
SEQUENCES = 2000
LONG = os.urandom(ANSWER_LIMIT_BYTES)


def run(work: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(work, 120.0))


async def listen(link: PeerLink, exchange: Exchange) -> None:
    """Hand an exchange what comes over its link, as the fleet does."""
    try:
        while True:
            exchange.take(await link.receive())
    except ExchangeError as error:
        link.close(str(error), offends=True)
    except LinkClosedError:
        pass
    finally:
        exchange.end()


@asynccontextmanager
async def exchanging(root: Path) -> AsyncIterator[tuple[Exchange, Exchange, Contents, PeerLink]]:
    """Give both ends' exchanges, what the second one answers, and the link of the first."""
    contents = Contents()
    async with linked(root) as (one, two):
        ours, theirs = Exchange(one, Contents(), TWO), Exchange(two, contents, ONE)
        tasks = [asyncio.create_task(listen(one, ours)), asyncio.create_task(listen(two, theirs))]
        try:
            yield ours, theirs, contents, one
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


@pytest.mark.parametrize("content", [b"x", b"y" * CHUNK_BYTES, b"z" * (CHUNK_BYTES + 1), LONG, b""])
def test_a_content_comes_whole_and_so_does_a_problem(tmp_path: Path, content: bytes) -> None:
    async def work() -> None:
        async with exchanging(tmp_path) as (ours, _, contents, _link):
            contents[f"plan {NAME}"] = content
            assert await ours.ask(Topic.PLAN, NAME) == content
            if content:
                assert await ours.ask(Topic.SOLVE, NAME, content, 2.5) == content[::-1]
                assert contents.solved == [("one", 2.5)]

    run(work())


def test_a_refusal_has_its_reason_and_the_next_question_is_answered(tmp_path: Path) -> None:
    async def work() -> None:
        async with exchanging(tmp_path) as (ours, _, contents, _link):
            contents.refusal = "somebody uses the device"
            contents[f"costs {NAME}"] = b"3"
            with pytest.raises(NotAnsweredError, match="no plan of this name"):
                await ours.ask(Topic.PLAN, NAME)
            with pytest.raises(NotAnsweredError, match="somebody uses the device"):
                await ours.ask(Topic.SOLVE, NAME, LONG)
            contents[f"plan {NAME}"] = LONG + b"1"
            with pytest.raises(NotAnsweredError, match="more than the 1048576 that can be sent"):
                await ours.ask(Topic.PLAN, NAME)
            assert await ours.ask(Topic.COSTS, NAME) == b"3"

    run(work())


def test_both_ends_ask_at_once_and_many_wait_their_turn(tmp_path: Path) -> None:
    async def work() -> None:
        async with exchanging(tmp_path) as (ours, theirs, contents, _link):
            contents[f"plan {NAME}"] = LONG
            sent = [ours.ask(Topic.PLAN, NAME) for _ in range(3)]
            back = theirs.ask(Topic.SOLVE, NAME, LONG)
            *found, turned = await asyncio.gather(*sent, back)
            assert found == [LONG] * 3 and turned == LONG[::-1]

    run(work())


def test_a_question_that_is_given_up_stops_the_solver_and_leaves_the_next_one_alone(tmp_path: Path) -> None:
    async def work() -> None:
        async with exchanging(tmp_path) as (ours, _, contents, _link):
            contents.solving_s = 60.0
            contents[f"plan {NAME}"] = b"here"
            asked = asyncio.create_task(ours.ask(Topic.SOLVE, NAME, b"problem"))
            await until(lambda: contents.begun == 1)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            await until(lambda: contents.stopped == 1)
            assert await ours.ask(Topic.PLAN, NAME) == b"here"

    run(work())


def test_nothing_that_comes_and_an_end_of_the_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "ANSWER_S", 0.2)
    monkeypatch.setattr(answers_module, "ANSWER_S", 0.2)  # what solving is waited for beside its CPU time

    async def work() -> None:
        async with exchanging(tmp_path) as (ours, _, contents, link):
            contents.solving_s = 60.0
            with pytest.raises(NotAnsweredError, match="nothing arrived within"):
                await ours.ask(Topic.SOLVE, NAME, b"problem")
            asking = asyncio.create_task(ours.ask(Topic.SOLVE, NAME, b"problem", 100.0))
            await until(lambda: contents.begun == 2)
            link.close("enough")
            with pytest.raises(LinkClosedError, match="enough"):
                await asking
            await until(lambda: contents.stopped == 2)

    run(work())


def test_an_older_agent_is_asked_nothing(tmp_path: Path) -> None:
    async def work() -> None:
        async with exchanging(tmp_path) as (ours, _, _contents, link):
            link.version = 1
            with pytest.raises(NotAnsweredError, match="older and answers no questions; update it"):
                await ours.ask(Topic.PLAN, NAME)
            assert link.end is None

    run(work())


def question(number: int, **changes: object) -> PeerQuestion:
    return PeerQuestion(**{"number": number, "about": "plan", "name": NAME, **changes})  # type: ignore[arg-type]


OFFENCES: dict[str, list[PeerMessage]] = {
    "hello": [own_hello("1")],
    "the same number": [question(3), question(3)],
    "a smaller number": [question(3), question(2)],
    "chunks of nothing": [QuestionChunk(number=1, data=b"x")],
    "more than announced": [question(1, about="solve", nbytes=3), QuestionChunk(number=1, data=b"four")],
    "withdrawn unasked": [Withdrawal(number=7)],
    "an answer to nothing": [PeerAnswer(number=1, answer=AnswerKind.FOUND)],
    "a chunk of no answer": [AnswerChunk(number=1, data=b"x")],
    "a flood of questions": [question(number) for number in range(1, MAX_COUNTED + 2)],
    "a flood of withdrawals": [question(1), *[Withdrawal(number=1)] * (MAX_COUNTED + 1)],
}


@pytest.mark.parametrize("offence", OFFENCES)
def test_what_no_agent_sends_ends_the_connection(tmp_path: Path, offence: str) -> None:
    async def work() -> None:
        async with linked(tmp_path) as (one, two):
            listening = asyncio.create_task(listen(two, Exchange(two, Contents(), ONE)))
            for message in OFFENCES[offence]:
                one.send_soon(message)
                await asyncio.sleep(0)
            await listening
            assert two.end is not None and two.end.offends

    run(work())


@pytest.mark.parametrize(
    "answers",
    [
        [PeerAnswer(number=1, answer=AnswerKind.FOUND, nbytes=2), AnswerChunk(number=1, data=b"abc")],
        [PeerAnswer(number=1, answer=AnswerKind.FOUND, nbytes=2), PeerAnswer(number=1, answer=AnswerKind.FOUND)],
        [PeerAnswer(number=1, answer=AnswerKind.REFUSED), AnswerChunk(number=1, data=b"a")],
        [PeerAnswer(number=2, answer=AnswerKind.FOUND)],
        [AnswerChunk(number=1, data=b"a")],
    ],
)
def test_answers_that_no_agent_gives_end_the_connection(tmp_path: Path, answers: list[PeerMessage]) -> None:
    async def work() -> None:
        async with linked(tmp_path) as (one, two):
            ours = Exchange(one, Contents(), TWO)
            listening = asyncio.create_task(listen(one, ours))
            asking = asyncio.create_task(ours.ask(Topic.PLAN, NAME))
            assert isinstance(await two.receive(), PeerQuestion)
            for message in answers:
                two.send_soon(message)
            await listening
            assert one.end is not None and one.end.offends
            with pytest.raises((LinkClosedError, NotAnsweredError)):
                await asking

    run(work())


def test_a_subject_of_a_later_version_is_refused_politely(tmp_path: Path) -> None:
    async def work() -> None:
        async with linked(tmp_path) as (one, two):
            listening = asyncio.create_task(listen(two, Exchange(two, Contents(), ONE)))
            one.send_soon(question(1, about="weather"))
            answer = await one.receive()
            assert isinstance(answer, PeerAnswer) and answer.answer is AnswerKind.REFUSED
            assert "weather is not a topic that this agent answers; update it" in answer.reason
            one.close("done")
            await listening

    run(work())


def test_who_asks_without_end_is_answered_so_often_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(exchange_module, "time", SimpleNamespace(monotonic=lambda: 100.0))

    async def work() -> None:
        async with exchanging(tmp_path) as (ours, _, contents, _link):
            contents[f"plan {NAME}"] = b"here"
            monkeypatch.setattr(asyncio, "sleep", pause)
            for _ in range(10):
                await ours.ask(Topic.PLAN, NAME)
            monkeypatch.setattr(asyncio, "sleep", sleep)
            assert [s for s in pauses if s > 0] == [pytest.approx(exchange_module.ANSWER_EVERY_S)] * 9

    run(work())


@pytest.mark.slow
def test_any_order_of_messages_is_taken_or_refused_and_nothing_grows(tmp_path: Path) -> None:
    """What messages say may be anything that decodes:
    `tests/agent/peers/connection/test_messages.py` fuzzes their bytes.
    """
    random_ = random.Random(23)

    def message() -> PeerMessage:
        number = random_.choice([1, 1, 1, 1, 1, 1, 2])
        match random_.randrange(5):
            case 0:
                return question(
                    number, about=random_.choice(["plan", "solve", "x"]), nbytes=random_.choice([0, 9, 1 << 20])
                )
            case 1:
                return QuestionChunk(number=number, data=random_.randbytes(random_.choice([1, 2, CHUNK_BYTES])))
            case 2:
                return Withdrawal(number=number)
            case 3:
                return PeerAnswer(
                    number=number, answer=random_.choice([*AnswerKind]), nbytes=random_.choice([0, 9, 1 << 20])
                )
            case _:
                return AnswerChunk(number=number, data=random_.randbytes(random_.choice([1, 2, CHUNK_BYTES])))

    async def work() -> None:
        async with linked(tmp_path) as (one, _):
            taken = refused = before = 0
            tracemalloc.start()
            for turn in range(SEQUENCES):
                if turn == SEQUENCES // 2:
                    gc.collect()
                    before = tracemalloc.get_traced_memory()[0]
                exchange = Exchange(one, Contents(), TWO)
                asking = asyncio.create_task(exchange.ask(Topic.PLAN, NAME))
                await asyncio.sleep(0)
                try:
                    exchange.take(question(1, about="solve", nbytes=1 << 20))
                    for _step in range(20):
                        exchange.take(message())
                        await asyncio.sleep(0)
                        taken += 1
                except ExchangeError:
                    refused += 1
                exchange.end()
                asking.cancel()
                await asyncio.wait({asking})
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - before
            tracemalloc.stop()
            assert taken > SEQUENCES and refused > SEQUENCES // 2 and grown < 300_000, (taken, refused, grown)

    run(work())
