"""Requests of a federation's leader, and the members' answers, as MessagePack with limits on everything.

`MembershipRequest` asks which jobs the leader may lead, and `Invitation` whether a device takes part now.
`MessageChunk` sends a Flower message part by part, and `ReplyRequest` fetches the reply when it exists.
`RoundEnd` reports that nobody waits for it any longer. A message is identified by its hash, so repeating a part
or a request has no effect. A job's name is sent only to its members: a device names the jobs that the asking
device may lead, and mentions no others.
"""

import hashlib
from enum import StrEnum
from typing import Annotated

import msgspec

from port_agent.peers.decoding import LONGEST_ROUND_S, PeerCodec, Reason, Sha256, Token
from port_agent.peers.transfer import CHUNK_BYTES
from port_planner.base.errors import PortError

MAX_MESSAGE_BYTES = 4 << 30
"""Largest message in bytes: weights of a billion parameters in 32 bits.

A device accepts less, depending on what its job federates.
"""

MAX_MEMBERSHIPS = 100
"""Largest number of jobs that one device may lead on another."""

_JOB = Annotated[str, msgspec.Meta(min_length=1, max_length=63)]
_SIZE = Annotated[int, msgspec.Meta(ge=0, le=MAX_MESSAGE_BYTES)]


class FederationMessageError(PortError):
    """Bytes that are not a request or an answer of a federation."""


class MembershipRequest(msgspec.Struct, tag_field="kind", tag="memberships", frozen=True):
    """Asks which jobs of a device the asking one may lead."""


class FederationRequest(msgspec.Struct, tag_field="kind", frozen=True, kw_only=True):
    """A request about a job, which both devices call by the same name, in one run of a federation."""

    job: _JOB
    run: Token


class Invitation(FederationRequest, tag="invitation", frozen=True, kw_only=True):
    """Asks whether the device would take part in a round now."""

    tensors: Sha256
    """Hash of names, types and shapes of the averaged tensors."""


class MessageChunk(FederationRequest, tag="part", frozen=True, kw_only=True):
    """A part of a message, which begins at `offset`."""

    message: Sha256
    tensors: Sha256
    total: _SIZE
    offset: _SIZE
    data: Annotated[bytes, msgspec.Meta(min_length=1, max_length=CHUNK_BYTES)]
    number: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    """Number of the round."""
    lease_s: Annotated[float, msgspec.Meta(gt=0.0, le=LONGEST_ROUND_S)]
    """Seconds of silence after which the leader counts as gone, and work for it ends."""


class ReplyRequest(FederationRequest, tag="reply", frozen=True, kw_only=True):
    """Asks for a part of the reply to a message, which begins at `offset`."""

    message: Sha256
    offset: _SIZE


class RoundEnd(FederationRequest, tag="end", frozen=True, kw_only=True):
    """Reports that nobody waits for the reply any more."""

    message: Sha256


JobRequest = Invitation | MessageChunk | ReplyRequest | RoundEnd
Request = MembershipRequest | Invitation | MessageChunk | ReplyRequest | RoundEnd


class TaskState(StrEnum):
    """The state of a message on a device."""

    READY = "ready"
    """The device would take part."""
    REFUSED = "refused"
    """The device does not take part now, for the given reason."""
    RECEIVING = "receiving"
    """The device has the first `size` bytes of the message."""
    WORKING = "working"
    """The device has the message, but no reply yet."""
    DONE = "done"
    """The reply has `size` bytes in total, and `data` is a part of it."""
    FAILED = "failed"
    """There will be no reply, for the given reason."""
    UNKNOWN = "unknown"
    """The device has no such message; it may be sent again."""


class TaskAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to any of these requests."""

    state: TaskState
    reason: Reason = ""
    size: _SIZE = 0
    data: Annotated[bytes, msgspec.Meta(max_length=CHUNK_BYTES)] = b""
    sha256: Sha256 | None = None
    """Hash of the complete reply; None from a device whose agent is older."""
    jobs: Annotated[tuple[_JOB, ...], msgspec.Meta(max_length=MAX_MEMBERSHIPS)] = ()
    """Jobs that the leader may lead."""


FEDERATION_REQUESTS: "PeerCodec[Request]" = PeerCodec(Request, FederationMessageError, "not a request of a federation")
FEDERATION_ANSWERS: "PeerCodec[TaskAnswer]" = PeerCodec(
    TaskAnswer, FederationMessageError, "not an answer of a federation"
)


def node_number(device_id: str) -> int:
    """Return a device's number among Flower's nodes."""
    return int(hashlib.sha256(device_id.encode()).hexdigest()[:15], 16) + 2
