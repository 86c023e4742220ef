"""Messages of paired devices: MessagePack maps, each with its kind; every text and list has a size limit.

Unknown keys are skipped, so that keys can be added within a version; an unknown kind ends the connection. `PeerHello`
comes first from both sides and settles the version.
"""

import math
from enum import StrEnum
from typing import Annotated

import msgspec

from port_agent.peers.announcement import BOARD_LIMIT, NAME_LIMIT, VERSION_LIMIT
from port_agent.peers.decoding import PeerCodec, Reason, Sha256
from port_planner.base.errors import PortError

OLDEST_VERSION, NEWEST_VERSION = 1, 2
"""Oldest and newest version of this protocol that this agent supports."""
QUESTIONS_VERSION = 2
"""First protocol version with questions and answers; devices with an older one are not asked anything."""
CHUNK_BYTES = 12 << 10
"""Size in bytes of the chunks in which longer content is sent, each in one frame."""
QUESTION_LIMIT_BYTES = 1 << 20
"""Largest question in bytes.

A compressed planning problem of 6,000 operators, the largest that is searched, takes 0.2 MB.
"""
ANSWER_LIMIT_BYTES = 1 << 20
"""Largest answer in bytes: costs of 20,000 operators, or a plan, which takes some kB."""
_LONGEST_SOLVING_S = 3600.0
_MAX_NUMBER = 1 << 31
_MAX_JOULES = 1e12
"""Largest plausible joules: a day at 11 megawatts."""
_MAX_VERSION = 1 << 16

Version = Annotated[int, msgspec.Meta(ge=1, le=_MAX_VERSION)]
QuestionNumber = Annotated[int, msgspec.Meta(ge=1, lt=_MAX_NUMBER)]
Chunk = Annotated[bytes, msgspec.Meta(min_length=1, max_length=CHUNK_BYTES)]


class PeerMessageError(PortError):
    """Bytes that are not a message of this protocol."""


class PeerMessage(msgspec.Struct, tag_field="kind", frozen=True, kw_only=True):
    """One message; each kind is a separate class."""


class PeerHello(PeerMessage, tag="hello", frozen=True, kw_only=True):
    """The first message of both sides."""

    oldest: Version
    newest: Version
    software: Annotated[str, msgspec.Meta(max_length=VERSION_LIMIT)] = ""


class Heartbeat(PeerMessage, tag="heartbeat", frozen=True, kw_only=True):
    """The current activity of a device; sent every few seconds as a sign of life."""

    name: Annotated[str, msgspec.Meta(max_length=NAME_LIMIT)]
    board: Annotated[str, msgspec.Meta(max_length=BOARD_LIMIT)]
    state: Annotated[str, msgspec.Meta(max_length=20)]
    """A `PublicState`; one that the reader does not know is shown as unknown."""
    charging: bool | None = None
    """Whether the device has external power; None if unknown."""
    job: Annotated[str, msgspec.Meta(max_length=NAME_LIMIT)] | None = None
    """Name of the job that the device trains."""
    progress: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None
    today_joules: Annotated[float, msgspec.Meta(ge=0.0, le=_MAX_JOULES)] | None = None
    """Joules since midnight of that device; None if nothing measures them."""
    is_measured: bool = False
    """Whether these joules are measured, or estimated."""

    def __post_init__(self) -> None:
        """Reject NaN, which the range checks let through."""
        if any(value is not None and math.isnan(value) for value in (self.progress, self.today_joules)):
            raise ValueError("not a number (NaN)")


class PeerQuestion(PeerMessage, tag="question", frozen=True, kw_only=True):
    """A question of one device to another; one at a time in each direction, with ascending numbers."""

    number: QuestionNumber
    about: Annotated[str, msgspec.Meta(max_length=20)]
    """A `Topic`; one that the reader does not know is refused with a reason."""
    name: Sha256
    """The content hash of what is requested."""
    nbytes: Annotated[int, msgspec.Meta(ge=0, le=QUESTION_LIMIT_BYTES)] = 0
    """Bytes that follow in chunks once the other device answers GO_ON; 0 if there are none."""
    seconds: Annotated[float, msgspec.Meta(ge=0.0, le=_LONGEST_SOLVING_S)] = 0.0
    """CPU time that solving may take."""

    def __post_init__(self) -> None:
        """Reject NaN, which the range checks let through."""
        if math.isnan(self.seconds):
            raise ValueError("not a number (NaN)")


class QuestionChunk(PeerMessage, tag="question-piece", frozen=True, kw_only=True):
    """The next bytes of the content that belongs to a question."""

    number: QuestionNumber
    data: Chunk


class Withdrawal(PeerMessage, tag="withdrawal", frozen=True, kw_only=True):
    """Nobody waits for the answer to a question any more."""

    number: QuestionNumber


class AnswerKind(StrEnum):
    """How a question is answered."""

    GO_ON = "go on"
    """The data of the question may be sent."""
    FOUND = "found"
    """The content follows in chunks."""
    REFUSED = "refused"
    """There is no content, for the given reason."""


class PeerAnswer(PeerMessage, tag="answer", frozen=True, kw_only=True):
    """The answer to the question of that number."""

    number: QuestionNumber
    answer: AnswerKind
    reason: Reason = ""
    nbytes: Annotated[int, msgspec.Meta(ge=0, le=ANSWER_LIMIT_BYTES)] = 0


class AnswerChunk(PeerMessage, tag="answer-piece", frozen=True, kw_only=True):
    """The next bytes of the found content."""

    number: QuestionNumber
    data: Chunk


class Goodbye(PeerMessage, tag="goodbye", frozen=True, kw_only=True):
    """The last message: why the connection ends."""

    reason: Reason


_KINDS = PeerHello | Heartbeat | PeerQuestion | QuestionChunk | Withdrawal | PeerAnswer | AnswerChunk | Goodbye
PEER_MESSAGES: "PeerCodec[PeerMessage]" = PeerCodec(_KINDS, PeerMessageError, "not a message of this protocol")


def common_version(ours: PeerHello, theirs: PeerHello) -> int:
    """Return the newest version that both speak.

    Raises PeerMessageError, which names the older side, if there is none.
    """
    version = min(ours.newest, theirs.newest)
    if version < max(ours.oldest, theirs.oldest):
        older = "this agent" if ours.newest < theirs.newest else "the other agent"
        raise PeerMessageError(
            f"no common protocol version: {ours.oldest} to {ours.newest} here, {theirs.oldest} to "
            f"{theirs.newest} there; update {older}"
        )
    return version


def own_hello(software: str) -> PeerHello:
    """Return the greeting of this agent."""
    return PeerHello(oldest=OLDEST_VERSION, newest=NEWEST_VERSION, software=software[:VERSION_LIMIT])
