"""The exchange: who knows the code gets the other's certificate, who does not gets nothing, whoever is in between."""

import random

import msgspec
import pytest

from port_agent.peers.pairing.exchange import (
    PairingError,
    PairingExchange,
    PairingPartner,
    PairingSide,
    WrongCodeError,
    refusal,
)

ONE, TWO = PairingPartner(b"certificate one", "attic", 9478), PairingPartner(b"certificate two", "cellar", 9500)
CODE, OTHER_CODE = "482193059", "482193065"


def sides(joiner: str = CODE, shower: str = CODE) -> tuple[PairingExchange, PairingExchange]:
    """Return both sides after their first messages."""
    one, two = PairingExchange(PairingSide.JOINER, joiner, ONE), PairingExchange(PairingSide.SHOWER, shower, TWO)
    two.take_start(one.start())
    one.take_start(two.start())
    return one, two


def test_with_the_code_each_learns_who_the_other_is() -> None:
    one, two = sides()
    assert two.take_proof(one.proof()) == ONE
    assert one.take_proof(two.proof()) == TWO


def test_with_another_code_neither_does() -> None:
    one, two = sides(joiner=OTHER_CODE)
    with pytest.raises(WrongCodeError):
        two.take_proof(one.proof())
    with pytest.raises(WrongCodeError):
        one.take_proof(two.proof())


@pytest.mark.parametrize("field", ["certificate", "name", "port"])
def test_nobody_in_between_can_put_in_another_certificate_name_or_port(field: str) -> None:
    one, two = sides()
    heartbeat = msgspec.msgpack.decode(one.proof())
    heartbeat[field] = {"certificate": b"certificate of a third", "name": "attic2", "port": 1}[field]
    with pytest.raises(WrongCodeError):
        two.take_proof(msgspec.msgpack.encode(heartbeat))


def test_a_proof_sent_back_is_no_proof() -> None:
    one, two = sides()
    with pytest.raises(WrongCodeError):
        one.take_proof(one.proof())
    with pytest.raises(PairingError):
        one, two = PairingExchange(PairingSide.JOINER, CODE, ONE), PairingExchange(PairingSide.JOINER, CODE, TWO)
        one.take_start(two.start())


def test_a_proof_of_another_run_is_no_proof() -> None:
    one, _ = sides()
    _, two = sides()
    with pytest.raises(WrongCodeError):
        two.take_proof(one.proof())


def test_a_proof_before_there_is_a_key_is_no_proof() -> None:
    one, _ = sides()
    with pytest.raises(WrongCodeError):
        PairingExchange(PairingSide.SHOWER, CODE, TWO).take_proof(one.proof())


def test_with_oneself_there_is_no_pairing() -> None:
    one, two = PairingExchange(PairingSide.JOINER, CODE, ONE), PairingExchange(PairingSide.SHOWER, CODE, ONE)
    two.take_start(one.start())
    one.take_start(two.start())
    with pytest.raises(PairingError, match="this device itself, or a copy"):
        two.take_proof(one.proof())


def test_a_refusal_is_told() -> None:
    one, _ = sides()
    with pytest.raises(PairingError, match="refused: the code is wrong; 2 more"):
        one.take_proof(refusal("the code is wrong; 2 more of 3 tries"))


@pytest.mark.parametrize(
    "element", [b"A" + bytes(32), b"A" + b"\xff" * 32, b"S" + bytes(32), b"A\x01" + bytes(31), b"", bytes(99)]
)
def test_points_that_are_none(element: bytes) -> None:
    with pytest.raises(PairingError):
        PairingExchange(PairingSide.SHOWER, CODE, TWO).take_start(
            msgspec.msgpack.encode({"kind": "start", "version": 1, "element": element})
        )


@pytest.mark.slow
def test_fuzzed_messages_never_pair() -> None:
    random_ = random.Random(7)
    for _ in range(300):
        one, two = sides()
        made = bytearray(one.proof())
        made[random_.randrange(len(made))] ^= 1 << random_.randrange(8)
        with pytest.raises(PairingError):
            two.take_proof(bytes(made))
    for _ in range(3000):
        junk = random_.randbytes(random_.randrange(0, 120))
        exchange = PairingExchange.__new__(PairingExchange)
        with pytest.raises(PairingError):
            exchange.take_start(junk)
