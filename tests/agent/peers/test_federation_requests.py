"""Requests of a federation: as they went, or refused; fuzzed ones never do anything else."""

import random

import msgspec
import pytest

from port_agent.peers.federation_requests import (
    FEDERATION_ANSWERS,
    FEDERATION_REQUESTS,
    FederationMessageError,
    Invitation,
    MembershipRequest,
    MessageChunk,
    ReplyRequest,
    Request,
    RoundEnd,
    TaskAnswer,
    TaskState,
)
from port_agent.peers.transfer import CHUNK_BYTES

HASH, RUN = "ab" * 32, "cd" * 16
PART = MessageChunk(
    job="digits", run=RUN, message=HASH, tensors=HASH, total=10, offset=3, data=b"1234567", number=3, lease_s=60.0
)
REQUESTS: list[Request] = [
    MembershipRequest(),
    Invitation(job="digits", run=RUN, tensors=HASH),
    PART,
    ReplyRequest(job="digits", run=RUN, message=HASH, offset=7),
    RoundEnd(job="digits", run=RUN, message=HASH),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda one: type(one).__name__)
def test_requests_come_as_they_went(request_: Request) -> None:
    assert FEDERATION_REQUESTS.decode(FEDERATION_REQUESTS.encode(request_)) == request_


def test_answers_come_as_they_went() -> None:
    answer = TaskAnswer(state=TaskState.DONE, size=12, data=b"hello")
    assert FEDERATION_ANSWERS.decode(FEDERATION_ANSWERS.encode(answer)) == answer


@pytest.mark.parametrize(
    "changes",
    [
        {"run": "no run"},
        {"job": ""},
        {"job": "x" * 64},
        {"message": "AB" * 32},
        {"message": HASH + "\n"},
        {"total": -1},
        {"offset": 1 << 40},
        {"data": b""},
        {"data": bytes(CHUNK_BYTES + 1)},
        {"kind": "other"},
        {"number": 0},
        {"lease_s": 0.0},
        {"lease_s": 1e9},
    ],
)
def test_what_no_leader_sends_is_refused(changes: dict[str, object]) -> None:
    plain = {**msgspec.to_builtins(PART, builtin_types=(bytes,)), **changes}
    with pytest.raises(FederationMessageError):
        FEDERATION_REQUESTS.decode(msgspec.msgpack.encode(plain))


@pytest.mark.slow
def test_fuzzed_bytes_are_read_or_refused() -> None:
    numbers = random.Random(1)
    good = [FEDERATION_REQUESTS.encode(one) for one in REQUESTS] + [
        FEDERATION_ANSWERS.encode(TaskAnswer(state=TaskState.READY))
    ]
    for _ in range(20_000):
        content = bytearray(numbers.choice(good))
        for _ in range(numbers.randrange(1, 4)):
            content[numbers.randrange(len(content))] = numbers.randrange(256)
        for decode in (FEDERATION_REQUESTS.decode, FEDERATION_ANSWERS.decode):
            try:
                decode(bytes(content))
            except FederationMessageError:
                continue
