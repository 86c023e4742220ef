"""What is said of a job that moves: round trips, bounds, and any bytes are read or refused."""

import random

import pytest

from port_agent.peers.connection.messages import ANSWER_LIMIT_BYTES, QUESTION_LIMIT_BYTES
from port_agent.peers.migration_requests import (
    MAX_FILES,
    MIGRATION_ANSWERS,
    MIGRATION_REQUESTS,
    Begin,
    Bring,
    Close,
    Fetch,
    Look,
    MigratedFile,
    MigratedJob,
    MigrationAnswer,
    MigrationMessageError,
    MigrationState,
    Offer,
    Part,
    Stop,
)
from port_agent.peers.transfer import CHUNK_BYTES

TOKEN, HASH = "ab" * 16, "cd" * 32
FILE = MigratedFile("state/slot.0", 7, HASH)
AnyRequest = Offer | Bring | Part | Begin | Look | Stop | Fetch | Close
REQUESTS: list[AnyRequest] = [
    Offer(token=TOKEN, nbytes=7, least_bytes=9, device_kind="cpu", machine=HASH),
    Bring(token=TOKEN, job=MigratedJob(name="birds", epochs=2, step=3), files=(FILE,)),
    Part(token=TOKEN, file=0, offset=3, data=b"four"),
    Begin(token=TOKEN),
    Look(token=TOKEN),
    Stop(token=TOKEN),
    Fetch(token=TOKEN, path="state/slot.0", offset=2),
    Close(token=TOKEN),
]
ANSWERS = [
    MigrationAnswer(state=MigrationState.WORKING, reason="trains", trains=True, step=3, loss=0.5, files=(FILE,)),
    MigrationAnswer(state=MigrationState.PART, data=b"some"),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda one: type(one).__name__)
def test_requests_come_back_as_they_were(request_: AnyRequest) -> None:
    assert MIGRATION_REQUESTS.decode(MIGRATION_REQUESTS.encode(request_)) == request_


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda one: one.state.value)
def test_answers_come_back_as_they_were(answer: MigrationAnswer) -> None:
    assert MIGRATION_ANSWERS.decode(MIGRATION_ANSWERS.encode(answer)) == answer


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../x", "state/../../x", "state//x", ".ssh/x", "state/.", "a\0b", "", "x" * 256]
)
def test_no_path_leads_out_of_the_job_s_directory(path: str) -> None:
    with pytest.raises(MigrationMessageError):
        MIGRATION_REQUESTS.decode(MIGRATION_REQUESTS.encode(Fetch(token=TOKEN, path=path, offset=0)))
    with pytest.raises(MigrationMessageError):
        MIGRATION_ANSWERS.decode(
            MIGRATION_ANSWERS.encode(MigrationAnswer(state=MigrationState.DONE, files=(MigratedFile(path, 1, HASH),)))
        )


def test_the_longest_of_each_fits_into_a_question_and_an_answer() -> None:
    files = tuple(MigratedFile("data/" + "x" * 250, 1 << 40, HASH) for _ in range(MAX_FILES))
    assert (
        len(MIGRATION_REQUESTS.encode(Bring(token=TOKEN, job=MigratedJob(name="x" * 63), files=files)))
        <= QUESTION_LIMIT_BYTES
    )
    assert (
        len(MIGRATION_ANSWERS.encode(MigrationAnswer(state=MigrationState.STOPPED, files=files))) <= ANSWER_LIMIT_BYTES
    )
    assert (
        len(MIGRATION_REQUESTS.encode(Part(token=TOKEN, file=0, offset=0, data=bytes(CHUNK_BYTES))))
        <= QUESTION_LIMIT_BYTES
    )
    with pytest.raises(MigrationMessageError):
        MIGRATION_REQUESTS.decode(
            MIGRATION_REQUESTS.encode(Bring(token=TOKEN, job=MigratedJob(name="x"), files=(*files, files[0])))
        )


@pytest.mark.slow
def test_fuzzed_bytes_are_read_or_refused() -> None:
    draw = random.Random(5)
    sound = [*map(MIGRATION_REQUESTS.encode, REQUESTS), *map(MIGRATION_ANSWERS.encode, ANSWERS)]
    refused = 0
    for _ in range(20_000):
        content = bytearray(draw.choice(sound))
        for _ in range(draw.randint(1, 4)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        cut = bytes(content[: draw.randint(0, len(content))]) if draw.random() < 0.3 else bytes(content)
        for decode in (MIGRATION_REQUESTS.decode, MIGRATION_ANSWERS.decode):
            try:
                decode(cut)
            except MigrationMessageError:
                refused += 1
    assert refused > 10_000
