"""The rules of jobs: states, backoff, order, what follows an exit."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from port_agent.jobs.job import (
    BACKOFF_LONGEST_S,
    FederationTerms,
    Job,
    JobKind,
    JobMeasurements,
    JobRequestError,
    JobSpec,
    JobState,
    WorkerOutcome,
    after_exit,
    backoff_s,
    check_spec,
    from_record,
    may_run,
    order,
    to_record,
)

SPEC = JobSpec(name="birds", bundle="bundle.port", epochs=3)


def job(number: int = 1, **changes: Any) -> Job:
    return replace(Job(id=number, spec=SPEC, submitted_at=float(number)), **changes)


def test_state_numbers_never_change() -> None:
    assert {state.name: int(state) for state in JobState} == {
        "QUEUED": 1,
        "WAITING_DATA": 2,
        "RUNNING": 3,
        "PAUSED": 4,
        "BACKOFF": 5,
        "FINISHED": 6,
        "FAILED": 7,
        "CANCELLED": 8,
        "AWAY": 9,
    }


def test_a_record_gives_the_job_back() -> None:
    original = job(
        state=JobState.BACKOFF,
        loss=0.1 + 0.2,
        measured=JobMeasurements(step_s=0.5),
        spec=replace(SPEC, kind=JobKind.MCU, arguments=("--port", "x"), deadline_at=1e9),
    )
    assert from_record(json.loads(json.dumps(to_record(original)))) == original


@pytest.mark.parametrize(
    "record", [{}, {"v": 2}, {"v": 1}, {**to_record(job()), "state": 99}, {**to_record(job()), "step": "7"}]
)
def test_a_foreign_record_is_refused(record: dict[str, object]) -> None:
    with pytest.raises(JobRequestError):
        from_record(record)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (replace(SPEC, name="../etc"), "job name"),
        (replace(SPEC, bundle=None), "needs a bundle"),
        (replace(SPEC, steps=5), "not both"),
        (replace(SPEC, epochs=0), "at least 1"),
        (replace(SPEC, priority=1000), "between -100 and 100"),
        (replace(SPEC, data="/data", waits_for_data=True), "give one of them"),
        (JobSpec("chats", None, JobKind.FINETUNE), "port-agent finetune --submit"),
        (JobSpec("chats", "b", JobKind.FINETUNE, epochs=2), "epochs of a fine-tuning is fixed when it is submitted"),
        (JobSpec("chats", "b", JobKind.FINETUNE, waits_for_data=True), "waits_for_data of a fine-tuning is fixed"),
    ],
)
def test_specs_that_cannot_run_are_refused(spec: JobSpec, words: str) -> None:
    with pytest.raises(JobRequestError, match=words):
        check_spec(spec)


def test_backoff_doubles_from_30_s_to_5_h() -> None:
    assert [backoff_s(n) for n in (1, 2, 3, 4)] == [30, 60, 120, 240]
    assert backoff_s(11) == backoff_s(10_000) == BACKOFF_LONGEST_S == 18_000


@pytest.mark.parametrize(
    ("state", "has_data", "waited", "expected"),
    [
        (JobState.QUEUED, False, False, True),
        (JobState.RUNNING, False, False, True),
        (JobState.BACKOFF, True, False, False),
        (JobState.BACKOFF, False, True, True),
        (JobState.WAITING_DATA, False, True, False),
        (JobState.WAITING_DATA, True, False, True),
        (JobState.PAUSED, True, True, False),
        (JobState.FINISHED, True, True, False),
        (JobState.FAILED, True, True, False),
        (JobState.CANCELLED, True, True, False),
        (JobState.AWAY, True, True, False),
    ],
)
def test_may_run(state: JobState, has_data: bool, waited: bool, expected: bool) -> None:
    assert may_run(job(state=state), has_data=has_data, waited=waited) is expected


def test_order_is_priority_then_deadline_then_age() -> None:
    jobs = [
        job(1),
        job(2, spec=replace(SPEC, deadline_at=2e9)),
        job(3, spec=replace(SPEC, deadline_at=1e9)),
        job(4, spec=replace(SPEC, priority=5)),
    ]
    assert [item.id for item in order(jobs)] == [4, 3, 2, 1]


@pytest.mark.parametrize(
    ("outcome", "smaller", "state"),
    [
        (WorkerOutcome.LEFT, None, JobState.QUEUED),
        (WorkerOutcome.FINISHED, None, JobState.FINISHED),
        (WorkerOutcome.WRITTEN, None, JobState.WAITING_DATA),
        (WorkerOutcome.CANCELLED, None, JobState.CANCELLED),
        (WorkerOutcome.IMPOSSIBLE, None, JobState.FAILED),
        (WorkerOutcome.CRASHED, None, JobState.BACKOFF),
        (WorkerOutcome.FAILED, None, JobState.BACKOFF),
        (WorkerOutcome.OUT_OF_MEMORY, None, JobState.BACKOFF),
        (WorkerOutcome.OUT_OF_MEMORY, 2, JobState.QUEUED),
    ],
)
def test_after_exit(outcome: WorkerOutcome, smaller: int | None, state: JobState) -> None:
    after = after_exit(job(state=JobState.RUNNING, step=5), outcome, "why", 6, smaller)
    assert after.state is state
    assert "why" in after.reason
    assert after.plan == smaller


def test_a_crash_loop_is_given_up_but_progress_forgives() -> None:
    current, waits = job(step=0), []
    for _ in range(5):
        current = after_exit(current, WorkerOutcome.CRASHED, "signal 11", 6, None)
        waits.append(current.retry_after_s)
    assert waits == [30, 60, 120, 240, 480]
    forgiven = after_exit(replace(current, step=7), WorkerOutcome.CRASHED, "signal 11", 6, None)
    assert (forgiven.state, forgiven.retry_after_s) == (JobState.BACKOFF, 30)
    given_up = after_exit(current, WorkerOutcome.CRASHED, "signal 11", 6, None)
    assert given_up.state is JobState.FAILED
    assert "given up after 6 failures" in given_up.reason and "signal 11" in given_up.reason


def test_a_job_that_waits_for_data_starts_over_after_each_round() -> None:
    waiting = job(spec=replace(SPEC, waits_for_data=True), state=JobState.RUNNING)
    after = after_exit(waiting, WorkerOutcome.FINISHED, "done", 6, None)
    assert (after.state, after.rounds) == (JobState.WAITING_DATA, 1)


def test_a_record_of_a_later_agent_and_one_with_a_loss_that_ran_away_are_read() -> None:
    record = json.loads(json.dumps({**to_record(job(loss=float("nan"))), "colour": "blue"}))
    assert str(from_record(record).loss) == "nan"


@pytest.mark.parametrize(
    ("terms", "federated", "refusal"),
    [
        (FederationTerms(leader="attic"), False, "submit it with --federated"),
        (FederationTerms(require_clip=0.0), True, "give a number above zero"),
        (FederationTerms(require_clip=math.inf), True, "give a number above zero"),
        (FederationTerms(require_clip=1.0, require_secure=True), True, "require one of them"),
        (FederationTerms(max_rounds=0), True, "give at least 1"),
        (FederationTerms(leader="attic", require_secure=True, max_rounds=3), True, ""),
    ],
)
def test_terms_of_a_federation_go_together(terms: FederationTerms, federated: bool, refusal: str) -> None:
    spec = JobSpec("birds", "birds.port", federated=federated, terms=terms)
    if not refusal:
        assert check_spec(spec) == spec
        return
    with pytest.raises(JobRequestError, match=refusal):
        check_spec(spec)
