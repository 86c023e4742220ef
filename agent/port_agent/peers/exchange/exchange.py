"""Questions over one connection, in both directions, one at a time in each.

The content of a question or an answer is sent in chunks of limited number and size. Every wait has an end, and a device
that asks more often than every `ANSWER_EVERY_S` must wait.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from port_agent.peers.announcement import clean
from port_agent.peers.connection.link import LinkClosedError, PeerLink
from port_agent.peers.connection.messages import (
    ANSWER_LIMIT_BYTES,
    CHUNK_BYTES,
    QUESTIONS_VERSION,
    AnswerChunk,
    AnswerKind,
    PeerAnswer,
    PeerMessage,
    PeerQuestion,
    QuestionChunk,
    Withdrawal,
)
from port_agent.peers.decoding import REASON_LIMIT
from port_agent.peers.exchange.answers import (
    ANSWER_S,
    NotAnsweredError,
    PeerClient,
    PeerServer,
    Topic,
    solving_patience_s,
)
from port_planner.base.errors import PortError

ANSWER_EVERY_S = 0.05
"""Least seconds between answers: a device that asks without end gets at most 20 answers per second."""
MAX_COUNTED, COUNTED_S = 1000, 10.0
"""Largest number of messages in this many seconds, except expected chunks: an honest device sends
400 if its answers cross.
"""


class ExchangeError(PortError):
    """A message that no agent sends, after which the connection must be closed."""


@dataclass(slots=True)
class _Exchange:
    """One question: its answer, or the content sent with it."""

    number: int
    nbytes: int = 0
    data: bytearray = field(default_factory=bytearray)
    answer: PeerAnswer | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, chunk: bytes) -> None:
        """Add the next chunk; raises ExchangeError for more than was announced."""
        if len(self.data) + len(chunk) > self.nbytes:
            raise ExchangeError(f"more than the {self.nbytes} bytes that were announced")
        self.data += chunk
        self.changed.set()

    @property
    def is_whole(self) -> bool:
        return len(self.data) == self.nbytes


class Exchange:
    """Questions and answers over one link to the device `client`."""

    def __init__(self, link: PeerLink, server: PeerServer, client: PeerClient) -> None:
        self._link, self._server, self._client = link, server, client
        self._turn = asyncio.Lock()
        self._sent = _Exchange(0)
        """The last question of this end; open while `_turn` is held."""
        self._received = _Exchange(0)
        """The last question of the other end; open while `_answering` exists."""
        self._answering: asyncio.Task[None] | None = None
        self._next_answer_s = 0.0
        self._counted_since_s, self._counted = 0.0, 0

    async def ask(self, topic: Topic, name: str, problem: bytes = b"", seconds: float = 0.0) -> bytes:
        """Return the other device's answer.

        Raises NotAnsweredError, and LinkClosedError if the connection ends meanwhile.
        """
        if self._link.version < QUESTIONS_VERSION:
            raise NotAnsweredError("its agent is older and answers no questions; update it")
        async with self._turn:
            sent = self._sent = _Exchange(self._sent.number + 1)
            question = PeerQuestion(number=sent.number, about=topic, name=name, nbytes=len(problem), seconds=seconds)
            try:
                await self._link.send(question)
                answer = await self._answer(sent, ANSWER_S)
                if answer.answer is AnswerKind.GO_ON:
                    sent.answer = None
                    for chunk in _chunks(problem):
                        await self._link.send(QuestionChunk(number=sent.number, data=chunk))
                    answer = await self._answer(sent, ANSWER_S + solving_patience_s(seconds))
                if answer.answer is not AnswerKind.FOUND:
                    raise NotAnsweredError(clean(answer.reason, REASON_LIMIT) or "it gives no reason")
                while not sent.is_whole:
                    await self._wait(sent, ANSWER_S)
            except (NotAnsweredError, asyncio.CancelledError):
                self._link.send_soon(Withdrawal(number=sent.number))  # otherwise the next question reports it
                raise
            return bytes(sent.data)

    def take(self, message: PeerMessage) -> None:
        """Handle a message of the other device; raises ExchangeError for one that no agent sends."""
        answering, asking = self._answering is not None, self._turn.locked()
        match message:
            case QuestionChunk() if answering and message.number == self._received.number:
                self._received.add(message.data)
            case AnswerChunk() if asking and message.number == self._sent.number:
                self._sent.add(message.data)
            case PeerQuestion():
                self._count()
                self._begin(message)
            case PeerAnswer() if asking and message.number == self._sent.number:
                self._count()
                self._hear(message)
            case Withdrawal() | QuestionChunk():
                self._count()
                self._check_number(message.number, self._received)
                if isinstance(message, Withdrawal) and message.number == self._received.number:
                    self.stop_answering()
            case PeerAnswer() | AnswerChunk():  # to a question that was withdrawn
                self._count()
                self._check_number(message.number, self._sent)
            case _:
                raise ExchangeError(f"a {type(message).__name__} was not expected")

    def end(self) -> None:
        """Stop, because the connection has ended."""
        self.stop_answering()
        self._sent.changed.set()

    def stop_answering(self) -> None:
        """Abandon the current answer, because nobody waits for it any more."""
        task, self._answering = self._answering, None
        if task is not None:
            task.cancel()

    # --- asking

    async def _answer(self, sent: _Exchange, patience_s: float) -> PeerAnswer:
        while sent.answer is None:
            await self._wait(sent, patience_s)
        return sent.answer

    async def _wait(self, exchanged: _Exchange, patience_s: float) -> None:
        """Wait for the next chunk or answer; raises NotAnsweredError if none arrives, LinkClosedError."""
        exchanged.changed.clear()
        if self._link.end is None:
            try:
                async with asyncio.timeout(patience_s):
                    await exchanged.changed.wait()
            except TimeoutError:
                raise NotAnsweredError(f"nothing arrived within {patience_s:.0f} s") from None
        if self._link.end is not None:
            raise LinkClosedError(self._link.end.reason)

    def _hear(self, message: PeerAnswer) -> None:
        if self._sent.answer is not None:
            raise ExchangeError("a second answer to one question")
        self._sent.answer = message
        self._sent.nbytes = message.nbytes if message.answer is AnswerKind.FOUND else 0
        self._sent.changed.set()

    @staticmethod
    def _check_number(number: int, last: _Exchange) -> None:
        if number > last.number:
            raise ExchangeError(f"question {number} was never asked")

    def _count(self) -> None:
        """Raise ExchangeError if there are more messages than questions and answers justify."""
        now_s = time.monotonic()
        if now_s - self._counted_since_s > COUNTED_S:
            self._counted_since_s, self._counted = now_s, 0
        self._counted += 1
        if self._counted > MAX_COUNTED:
            raise ExchangeError(f"more than {MAX_COUNTED} questions and answers in {COUNTED_S:.0f} s")

    # --- answering

    def _begin(self, question: PeerQuestion) -> None:
        if question.number <= self._received.number:
            raise ExchangeError(f"question {question.number} after question {self._received.number}")
        self.stop_answering()
        self._received = _Exchange(question.number, question.nbytes)
        self._answering = asyncio.get_running_loop().create_task(self._reply(question, self._received))

    async def _reply(self, question: PeerQuestion, received: _Exchange) -> None:
        content, reason = b"", ""
        try:
            await asyncio.sleep(max(0.0, self._next_answer_s - time.monotonic()))
            self._next_answer_s = time.monotonic() + ANSWER_EVERY_S
            content = await self._content(question, received)
            if len(content) > ANSWER_LIMIT_BYTES:
                reason = f"the answer has {len(content)} bytes, more than the {ANSWER_LIMIT_BYTES} that can be sent"
        except NotAnsweredError as error:
            reason = str(error)
        except LinkClosedError:
            return
        await self._answer_with(question.number, content, reason)

    async def _answer_with(self, number: int, content: bytes, reason: str) -> None:
        """Send an answer. Its last message completes the question, after which the next one may arrive."""
        kind = AnswerKind.REFUSED if reason else AnswerKind.FOUND
        messages: list[PeerMessage] = [
            PeerAnswer(number=number, answer=kind, reason=reason[:REASON_LIMIT], nbytes=0 if reason else len(content))
        ]
        if not reason:
            messages += [AnswerChunk(number=number, data=chunk) for chunk in _chunks(content)]
        last = messages.pop()
        try:
            for message in messages:
                await self._link.send(message)
            await self._link.writable()
            self._answering = None
            self._link.send_soon(last)
        except LinkClosedError:
            return

    async def _content(self, question: PeerQuestion, received: _Exchange) -> bytes:
        """Return the requested content; raises NotAnsweredError, LinkClosedError."""
        try:
            topic = Topic(question.about)
        except ValueError:
            raise NotAnsweredError(
                f"{clean(question.about, 20)} is not a topic that this agent answers; update it"
            ) from None
        if topic in (Topic.COSTS, Topic.PLAN):
            return await self._server.shared(topic, question.name)
        if topic is Topic.INTRODUCE:
            return await self._server.introduce(self._client)
        if topic is Topic.SOLVE:
            self._server.check_solving()
        await self._link.send(PeerAnswer(number=question.number, answer=AnswerKind.GO_ON))
        while not received.is_whole:
            await self._wait(received, ANSWER_S)
        if topic is Topic.FEDERATE:
            return await self._server.federate(self._client, bytes(received.data))
        if topic is Topic.MIGRATE:
            return await self._server.migrate(self._client, bytes(received.data))
        return await self._server.solve(self._client.name, bytes(received.data), question.seconds)


def _chunks(content: bytes) -> Iterator[bytes]:
    for at in range(0, len(content), CHUNK_BYTES):
        yield content[at : at + CHUNK_BYTES]
