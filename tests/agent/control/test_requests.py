"""What clients ask for is checked at the boundary."""

from pathlib import Path

import pytest

from port_agent.control.http import HttpError
from port_agent.control.requests import (
    JobChange,
    PauseRequest,
    WrongAnswer,
    decode_control_request,
    job_spec,
    solving_seconds,
)
from port_agent.jobs.job import JobKind, JobRequestError, JobSpec


def test_a_job_with_an_uploaded_bundle(tmp_path: Path) -> None:
    fields = {"name": "birds", "steps": 5, "data": str(tmp_path), "deadline_at": 7, "epochs": None, "v": 1}
    spec = job_spec(fields, "bundle.port")
    assert spec == JobSpec("birds", "bundle.port", steps=5, data=str(tmp_path), deadline_at=7)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs at /dev/shm")
def test_pages_do_not_go_to_a_directory_in_ram() -> None:
    with pytest.raises(JobRequestError, match=r"/dev/shm is itself in RAM .tmpfs."):
        job_spec({"name": "a", "page_dirs": ["/dev/shm"]}, "bundle.port")


def test_a_job_of_a_board_takes_its_arguments() -> None:
    spec = job_spec({"name": "imu", "kind": "mcu", "arguments": ["--simulate"]}, None)
    assert (spec.kind, spec.arguments, spec.bundle) == (JobKind.MCU, ("--simulate",), None)
    words = ["--board", "qemu-m4f", "--port", "/dev/ttyACM0", "--serial", "A1"]
    assert job_spec({"name": "imu", "kind": "mcu", "arguments": words}, None).arguments == tuple(words)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "missing required field `name`"),
        ({"name": "a", "owner": "root"}, "unknown settings of a job: owner"),
        ({"name": "a", "guest": {"owner": "x"}}, "unknown settings of a job: guest"),
        ({"name": "a", "kind": "attached"}, "no job kind 'attached'"),
        ({"name": "a", "color": "red"}, "unknown settings of a job: color"),
        ({"name": "a", "steps": True}, r"Expected `int . null`, got `bool` - at `\$.steps`"),
        ({"name": "a", "steps": "5"}, r"Expected `int . null`, got `str` - at `\$.steps`"),
        ({"name": "a", "arguments": "x"}, r"Expected `array`, got `str` - at `\$.arguments`"),
        (
            {"name": "a", "kind": "mcu", "arguments": ["--out", "/var/lib/port-agent/jobs.db"]},
            "a job accepts only --board",
        ),
        ({"name": "a", "kind": "mcu", "arguments": ["--port", "--out"]}, "a job accepts only --board"),
        ({"name": "a", "kind": "mcu", "arguments": ["--board=x", "--state-dir=/"]}, "a job accepts only --board"),
        ({"name": "a", "kind": "mcu", "arguments": ["--port"]}, "a job accepts only --board"),
        ({"name": "a", "kind": "mcu", "arguments": ["--shard", "4/3"]}, "write it as 2/3"),
        ({"name": "a", "arguments": ["--simulate"]}, "only a job of kind mcu"),
        ({"name": "a", "bundle": "pyproject.toml"}, "cannot read the bundle"),
        ({"name": "a", "data": "tests"}, "cannot see the directory"),
        ({"name": "a", "page_dirs": ["/nowhere/at/all"]}, "cannot write to the page directory /nowhere/at/all"),
        ({"name": "a", "page_dirs": ["tests"]}, "cannot write to the page directory tests"),
        ({"name": "a", "kind": "mcu", "page_dirs": ["/"]}, "only a job of kind train uses pages"),
        ({"name": "a", "kind": "cloud"}, "no job kind 'cloud'"),
        ({"name": "a", "kind": "finetune"}, "a fine-tuning's bundle is uploaded"),
        ({"name": "a", "kind": "finetune", "bundle": "/etc/shadow"}, "a fine-tuning's bundle is uploaded"),
        ({"name": "a", "kind": "finetune", "arguments": ["--user", "root"]}, "a fine-tuning's bundle is uploaded"),
        ({"name": "a", "bundle": "/nowhere/at/all"}, "cannot read the bundle"),
        ({"name": "a", "data": "/nowhere/at/all"}, "cannot see the directory"),
    ],
)
def test_a_job_that_makes_no_sense_is_refused(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(JobRequestError, match=reason):
        job_spec(fields, None)


def test_a_fine_tuning_says_nothing_of_itself_but_its_bundle() -> None:
    spec = job_spec({"name": "chats", "kind": "finetune", "priority": 3}, "bundle.port")
    assert spec == JobSpec("chats", "bundle.port", JobKind.FINETUNE, priority=3)
    with pytest.raises(JobRequestError, match="only a job of kind mcu accepts arguments"):
        job_spec({"name": "chats", "kind": "finetune", "arguments": ["--simulate"]}, "bundle.port")


def test_changes_of_a_job() -> None:
    spec = JobSpec("a", "b", deadline_at=5.0)
    assert decode_control_request({"priority": 3}, JobChange).apply(spec) == JobSpec(
        "a", "b", deadline_at=5.0, priority=3
    )
    assert decode_control_request({"deadline_at": 9}, JobChange).apply(spec).deadline_at == 9
    dropped = decode_control_request({"deadline_at": None}, JobChange)
    assert dropped.apply(spec).deadline_at is None and str(dropped) == "deadline_at is now None"
    assert decode_control_request({}, JobChange) == JobChange() and not JobChange().moves_deadline
    for fields, reason in (
        ({"priority": "high"}, r"`int . null`, got `str` - at `\$.priority`"),
        ({"priority": True}, "got `bool`"),
        ({"deadline_at": "tomorrow"}, r"got `str` - at `\$.deadline_at`"),
    ):
        with pytest.raises(HttpError, match=reason):
            decode_control_request(fields, JobChange)


def test_spans_of_a_pause() -> None:
    assert (
        decode_control_request({}, PauseRequest).for_s is None
        and decode_control_request({"for_s": 60}, PauseRequest).for_s == 60.0
    )
    for span in (0, -1, 400 * 86400, float("nan"), "1h"):
        with pytest.raises(HttpError, match=r"Expected .* - at `\$.for_s`"):
            decode_control_request({"for_s": span}, PauseRequest)


def test_who_is_accused_and_of_what() -> None:
    assert decode_control_request({"device": "attic", "reason": "a lie"}, WrongAnswer) == WrongAnswer("attic", "a lie")
    for fields in ({}, {"device": "attic"}, {"device": "", "reason": "x"}, {"device": "a", "reason": "x" * 201}):
        with pytest.raises(HttpError):
            decode_control_request(fields, WrongAnswer)


def test_seconds_for_a_solver() -> None:
    assert solving_seconds("12.500") == 12.5
    for text in ("", "-1", "nan", "1e3", "3601", "12s"):
        with pytest.raises(HttpError, match="not a valid time for solving"):
            solving_seconds(text)


@pytest.mark.parametrize("name", ["7", "007"])
def test_a_name_of_digits_is_taken_for_a_number(name: str) -> None:
    with pytest.raises(JobRequestError, match="is a number"):
        job_spec({"name": name}, "bundle.port")
    assert job_spec({"name": f"job-{name}"}, "bundle.port").name == f"job-{name}"
