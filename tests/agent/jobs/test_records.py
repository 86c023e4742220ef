"""Records of jobs: whatever bit flips is seen, and what other versions wrote is told from damage."""

import json

import pytest

from port_agent.jobs.job import Job, JobRequestError, JobSpec, to_record
from port_agent.jobs.records import DamagedRecordError, seal, unseal

JOB = Job(7, JobSpec(name="birds", bundle="bundle.port", deadline_at=1.8e9), 10.5, step=12, reason='said "no"')


def test_what_was_sealed_comes_back() -> None:
    record = unseal(seal(JOB, 3).encode())
    assert (record.job(), record.written, record.name) == (JOB, 3, "birds")


@pytest.mark.slow
def test_no_flipped_bit_makes_another_job() -> None:
    text = seal(JOB, 3).encode()
    for place in range(len(text) * 8):
        damaged = bytearray(text)
        damaged[place // 8] ^= 1 << place % 8
        try:
            record = unseal(bytes(damaged))
        except DamagedRecordError:
            continue
        assert record.job() == JOB and record.written == 3, place


def test_an_agent_that_did_not_seal_is_understood() -> None:
    record = unseal(json.dumps(to_record(JOB)).encode())
    assert (record.job(), record.written) == (JOB, 0)


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"id": "7"}', b"[" * 100_000, b'{"id": ' + b"9" * 5000 + b"}"])
def test_what_is_no_record_is_damaged(text: bytes) -> None:
    with pytest.raises(DamagedRecordError, match="damaged"):
        unseal(text)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"v": 2}, "version 2"),
        ({"state": 99}, "cannot be read"),
        ({"step": "many"}, "cannot be read"),
        ({"spec": {"name": "x", "bundle": "b", "kind": "quantum"}}, "cannot be read"),
        ({"spec": {"name": "x", "bundle": "b", "deadline_at": 8.64e12}}, "1970 and 2100"),
        ({"spec": {"name": "x", "bundle": "b", "deadline_at": 10**400}}, "."),
        ({"spec": {"name": "x", "bundle": "b", "steps": 10**400}}, "."),
    ],
)
def test_a_sound_record_that_this_agent_cannot_restore_says_why(change: dict[str, object], said: str) -> None:
    record = unseal(json.dumps({**to_record(JOB), **change}).encode())
    with pytest.raises(JobRequestError, match=said):
        record.job()
