"""The pairing protocol of two devices, without sockets: SPAKE2 over the code, then a proof from each side.

The side where the code was typed proves first that it knows the resulting key; only then does the device that shows the
code answer. A proof is an HMAC with that key over the accompanying certificate, name and port, so nobody between the
two can substitute another certificate. Each connection tests one code. Only the code is secret; each device later shows
its certificate to any caller.
"""

import hashlib
import hmac
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

import msgspec
from spake2 import SPAKE2_A, SPAKE2_B, SPAKEError
from spake2.ed25519_basic import NotOnCurve

from port_agent.peers.announcement import NAME_LIMIT
from port_agent.peers.connection.messages import NEWEST_VERSION, Version
from port_agent.peers.decoding import REASON_LIMIT, PeerCodec, Reason
from port_planner.base.errors import PortError

CERTIFICATE_LIMIT_BYTES = 2048
"""Largest certificate in bytes; ours has 500."""
_ELEMENT_BYTES = 33
"""Bytes of a point of Ed25519 and of the side from which it comes."""
_MAC_BYTES = 32

Certificate = Annotated[bytes, msgspec.Meta(min_length=1, max_length=CERTIFICATE_LIMIT_BYTES)]
Port = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]


class PairingError(PortError):
    """Two devices were not paired."""


class WrongCodeError(PairingError):
    """The other side does not know the code."""


class PairingSide(Enum):
    """The side that shows the code, and the side where it is typed."""

    JOINER = b"port-agent pairing: joiner"
    SHOWER = b"port-agent pairing: shower"


@dataclass(frozen=True, slots=True)
class PairingPartner:
    """A device that proved to know the code. `port`: where it listens for paired devices."""

    certificate: bytes
    name: str
    port: int


class _Start(msgspec.Struct, tag_field="kind", tag="start", frozen=True):
    version: Version
    element: Annotated[bytes, msgspec.Meta(min_length=_ELEMENT_BYTES, max_length=_ELEMENT_BYTES)]


class _Proof(msgspec.Struct, tag_field="kind", tag="proof", frozen=True):
    certificate: Certificate
    name: Annotated[str, msgspec.Meta(max_length=NAME_LIMIT)]
    port: Port
    mac: Annotated[bytes, msgspec.Meta(min_length=_MAC_BYTES, max_length=_MAC_BYTES)]


class _Refusal(msgspec.Struct, tag_field="kind", tag="refusal", frozen=True):
    reason: Reason


_MESSAGES: "PeerCodec[_Start | _Proof | _Refusal]" = PeerCodec(
    _Start | _Proof | _Refusal, PairingError, "the other side sent something that is not a pairing message"
)


class PairingExchange:
    """One side of one try: call `start`, `take_start`, then `proof` and `take_proof` in the order of the side."""

    def __init__(self, side: PairingSide, digits: str, own: PairingPartner) -> None:
        kind = SPAKE2_A if side is PairingSide.JOINER else SPAKE2_B
        names = {"idA": PairingSide.JOINER.value, "idB": PairingSide.SHOWER.value}
        self._spake = kind(digits.encode("ascii"), **names)
        self._side, self._own, self._key = side, own, b""
        self._element: bytes = self._spake.start()

    def start(self) -> bytes:
        """Return the first message."""
        return _MESSAGES.encode(_Start(NEWEST_VERSION, self._element))

    def take_start(self, content: bytes) -> None:
        """Process the other side's first message; raises PairingError."""
        message = _read(content)
        if not isinstance(message, _Start):
            raise PairingError("the other device uses another version of pairing; update the older one of the two")
        try:
            self._key = self._spake.finish(message.element)
        except (SPAKEError, NotOnCurve, ValueError) as error:
            raise PairingError(f"the other side did not send a point of the curve: {error}") from error

    def proof(self) -> bytes:
        """Return the proof that this side knows the code, with the data that the other side should trust."""
        own = self._own
        return _MESSAGES.encode(_Proof(own.certificate, own.name, own.port, self._mac(self._side, own)))

    def take_proof(self, content: bytes) -> PairingPartner:
        """Return the other device; raises WrongCodeError if it does not know the code, PairingError."""
        message = _read(content)
        if not isinstance(message, _Proof):
            raise PairingError("the other device pairs by another protocol; update the older one of the two")
        partner = PairingPartner(message.certificate, message.name, message.port)
        theirs = PairingSide.SHOWER if self._side is PairingSide.JOINER else PairingSide.JOINER
        if not self._key or not hmac.compare_digest(self._mac(theirs, partner), message.mac):
            raise WrongCodeError("the code is wrong")
        if partner.certificate == self._own.certificate:
            raise PairingError(
                "that is this device itself, or a copy of its state directory; delete identity.pem in the copy"
            )
        return partner

    def _mac(self, side: PairingSide, partner: PairingPartner) -> bytes:
        proof = msgspec.msgpack.encode((side.value, partner.certificate, partner.name, partner.port))
        return hmac.new(self._key, proof, hashlib.sha256).digest()


def refusal(reason: str) -> bytes:
    """Return the message that ends a try."""
    return _MESSAGES.encode(_Refusal(reason[:REASON_LIMIT]))


def _read(content: bytes) -> _Start | _Proof | _Refusal:
    message = _MESSAGES.decode(content)
    if isinstance(message, _Refusal):
        raise PairingError(f"the other device refused: {message.reason}")
    return message
