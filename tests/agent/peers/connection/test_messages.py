"""Messages: golden bytes, caps on everything, versions, and 100,000 invalid ones."""

import gc
import random
import tracemalloc

import msgspec
import pytest

from port_agent.peers.connection.messages import (
    ANSWER_LIMIT_BYTES,
    CHUNK_BYTES,
    NEWEST_VERSION,
    OLDEST_VERSION,
    PEER_MESSAGES,
    QUESTION_LIMIT_BYTES,
    AnswerChunk,
    AnswerKind,
    Goodbye,
    Heartbeat,
    PeerAnswer,
    PeerHello,
    PeerMessage,
    PeerMessageError,
    PeerQuestion,
    QuestionChunk,
    Withdrawal,
    common_version,
    own_hello,
)

SAMPLES: list[PeerMessage] = [
    PeerHello(oldest=1, newest=1, software="0.1.0"),
    Heartbeat(name="attic", board="Raspberry Pi 5", state="training", charging=True, job="birds", progress=0.25,
              today_joules=1234.5, is_measured=True),
    Heartbeat(name="", board="", state="idle"),
    Goodbye(reason="unpaired there"),
    PeerQuestion(number=1, about="solve", name="0f" * 32, nbytes=5000, seconds=12.0),
    QuestionChunk(number=1, data=b"a problem"),
    Withdrawal(number=1),
    PeerAnswer(number=1, answer=AnswerKind.REFUSED, reason="on battery 64 %"),
    PeerAnswer(number=2, answer=AnswerKind.FOUND, nbytes=9),
    AnswerChunk(number=2, data=b"an answer"),
]  # fmt: skip
QUESTION = {"kind": "question", "number": 1, "about": "plan", "name": "0f" * 32}
FUZZED = 100_000
GROWTH_BYTES = 200_000
"""Caches of interned strings and the like; a leak of one byte a message would be half of it."""


def test_golden() -> None:
    assert PEER_MESSAGES.encode(SAMPLES[0]).hex() == (
        "84a46b696e64a568656c6c6fa66f6c6465737401a66e657765737401a8736f667477617265a5302e312e30"
    )
    assert (
        PEER_MESSAGES.encode(SAMPLES[3]).hex()
        == "82a46b696e64a7676f6f64627965a6726561736f6eae756e706169726564207468657265"
    )


def test_golden_questions_and_answers() -> None:
    assert PEER_MESSAGES.encode(SAMPLES[6]).hex() == "82a46b696e64aa7769746864726177616ca66e756d62657201"
    assert PEER_MESSAGES.encode(SAMPLES[5]).hex() == (
        "83a46b696e64ae7175657374696f6e2d7069656365a66e756d62657201a464617461c409612070726f626c656d"
    )


@pytest.mark.parametrize("message", SAMPLES)
def test_read_as_written_and_not_when_cut_or_glued(message: PeerMessage) -> None:
    content = PEER_MESSAGES.encode(message)
    assert PEER_MESSAGES.decode(content) == message
    for end in range(len(content)):
        with pytest.raises(PeerMessageError):
            PEER_MESSAGES.decode(content[:end])
    with pytest.raises(PeerMessageError):
        PEER_MESSAGES.decode(content + content)


def test_keys_of_later_versions_are_skipped_and_kinds_are_not() -> None:
    later = msgspec.msgpack.encode({"kind": "goodbye", "reason": "x", "mood": ["sad", {"very": True}]})
    assert PEER_MESSAGES.decode(later) == Goodbye(reason="x")
    with pytest.raises(PeerMessageError, match="sing"):
        PEER_MESSAGES.decode(msgspec.msgpack.encode({"kind": "sing"}))


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "goodbye", "reason": "x" * 201},
        {"kind": "goodbye", "reason": b"x"},
        {"kind": "goodbye"},
        {"kind": "hello", "oldest": 0, "newest": 1},
        {"kind": "hello", "oldest": 1, "newest": 1 << 40},
        {"kind": "heartbeat", "name": "n" * 41, "board": "", "state": ""},
        {"kind": "heartbeat", "name": "", "board": "", "state": "", "today_joules": float("nan")},
        {"kind": "heartbeat", "name": "", "board": "", "state": "", "today_joules": float("inf")},
        {"kind": "heartbeat", "name": "", "board": "", "state": "", "today_joules": -1.0},
        {"kind": "heartbeat", "name": "", "board": "", "state": "", "progress": 1.5},
        {**QUESTION, "number": 0},
        {**QUESTION, "number": 1 << 31},
        {**QUESTION, "about": "x" * 21},
        {**QUESTION, "name": "0F" * 32},
        {**QUESTION, "name": "../" + "a" * 61},
        {**QUESTION, "nbytes": QUESTION_LIMIT_BYTES + 1},
        {**QUESTION, "nbytes": -1},
        {**QUESTION, "seconds": 3601.0},
        {**QUESTION, "seconds": float("nan")},
        {"kind": "question-piece", "number": 1, "data": b""},
        {"kind": "question-piece", "number": 1, "data": b"x" * (CHUNK_BYTES + 1)},
        {"kind": "question-piece", "number": 1, "data": "text"},
        {"kind": "answer", "number": 1, "answer": "maybe"},
        {"kind": "answer", "number": 1, "answer": "found", "nbytes": ANSWER_LIMIT_BYTES + 1},
        {"kind": "answer", "number": 1, "answer": "refused", "reason": "x" * 201},
        {"kind": "answer-piece", "number": 1, "data": b"x" * (CHUNK_BYTES + 1)},
        {"kind": "withdrawal", "number": -1},
        {},
        [],
        None,
        7,
    ],
)
def test_every_field_has_a_bound(wrong: object) -> None:
    with pytest.raises(PeerMessageError):
        PEER_MESSAGES.decode(msgspec.msgpack.encode(wrong))


def test_a_deep_nest_and_a_promise_of_many_are_refused() -> None:
    head = b"\x82\xa4kind\xa7goodbye\xa4mood"
    for body in (
        b"\x91" * 70_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
    ):
        with pytest.raises(PeerMessageError):
            PEER_MESSAGES.decode(head + body)


def mutated(random_: random.Random, content: bytes) -> bytes:
    """Return a message with a few bytes changed, put in, cut out or doubled; or bytes of no message at all."""
    if random_.random() < 0.1:
        return random_.randbytes(random_.randrange(1, 200))
    made = bytearray(content)
    for _ in range(random_.randrange(1, 5)):
        at = random_.randrange(len(made) + 1)
        match random_.randrange(4):
            case 0:
                made[at : at + 1] = random_.randbytes(1)
            case 1:
                made[at:at] = random_.randbytes(random_.randrange(1, 9))
            case 2:
                del made[at : at + random_.randrange(1, 9)]
            case _:
                made[at:at] = made[: random_.randrange(len(made) + 1)]
    return bytes(made)


@pytest.mark.slow
def test_100_000_fuzzed_messages_are_read_or_refused_and_nothing_grows() -> None:
    random_ = random.Random(23)
    contents = [PEER_MESSAGES.encode(message) for message in SAMPLES]
    read = refused = before = 0
    tracemalloc.start()
    try:
        for number in range(FUZZED):
            if number == FUZZED // 2:
                gc.collect()
                before = tracemalloc.get_traced_memory()[0]
            try:
                message = PEER_MESSAGES.decode(mutated(random_, random_.choice(contents)))
            except PeerMessageError:
                refused += 1
            else:
                assert PEER_MESSAGES.decode(PEER_MESSAGES.encode(message)) == message
                read += 1
        gc.collect()
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert read > 1000 and refused > FUZZED // 2, (read, refused)
    assert after - before < GROWTH_BYTES


def test_the_newest_version_that_both_speak_or_who_is_to_be_updated() -> None:
    ours = PeerHello(oldest=2, newest=4)
    assert common_version(ours, PeerHello(oldest=1, newest=3)) == 3
    assert common_version(ours, PeerHello(oldest=4, newest=9)) == 4
    with pytest.raises(PeerMessageError, match="2 to 4 here, 5 to 6 there; update this agent"):
        common_version(ours, PeerHello(oldest=5, newest=6))
    with pytest.raises(PeerMessageError, match="1 to 1 there; update the other agent"):
        common_version(ours, PeerHello(oldest=1, newest=1))
    hello = own_hello("1.2.3" * 10)
    assert (hello.oldest, hello.newest, len(hello.software)) == (OLDEST_VERSION, NEWEST_VERSION, 20)
