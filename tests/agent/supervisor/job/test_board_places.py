"""What a job says of where it is trained."""

import json
from pathlib import Path
from typing import Any

from port_agent.jobs.job import Job, JobKind, JobSpec
from port_agent.supervisor.job.board_places import THIS_COMPUTER, place_of, plugged_in


def job(*words: str, number: int = 1, kind: JobKind = JobKind.MCU) -> Job:
    return Job(number, JobSpec("wrist", "model", kind, arguments=words), 0.0)


def job_file(folder: Path, **fields: Any) -> Path:
    (folder / "job.json").write_text(json.dumps({"v": 1, "model": ".", **fields}))
    return folder


def test_a_board_is_named_by_the_job_or_its_file(tmp_path: Path) -> None:
    assert place_of(job(kind=JobKind.TRAIN), None) == THIS_COMPUTER
    assert place_of(job("--port", "/dev/ttyACM1"), None) == "/dev/ttyACM1"
    assert place_of(job("--board", "nrf52840", "--serial", "42"), None) == "serial number 42"
    folder = job_file(tmp_path, port="/dev/ttyACM0")
    assert place_of(job(), folder) == place_of(job(), folder / "job.json") == "/dev/ttyACM0"
    assert place_of(job("--port", "/dev/ttyACM1"), folder) == "/dev/ttyACM1"


def test_simulated_boards_are_many_and_nameless_jobs_share_one(tmp_path: Path) -> None:
    assert place_of(job("--simulate"), None) != place_of(job("--simulate", number=2), None)
    assert place_of(job(), job_file(tmp_path, simulate=True)) != place_of(job(number=2), tmp_path)
    (tmp_path / "job.json").write_text("[" * 100_000)
    assert place_of(job(), tmp_path) == place_of(job(number=2), tmp_path / "gone") == place_of(job(number=3), None)


def test_a_serial_device_that_comes_or_goes_is_seen(tmp_path: Path) -> None:
    port = tmp_path / "pty"
    before = plugged_in(str(port), tmp_path)
    (tmp_path / "tty1").touch()
    assert plugged_in(str(port), tmp_path) == before
    (tmp_path / "ttyACM3").touch()
    with_device = plugged_in(str(port), tmp_path)
    port.touch()
    assert before < with_device < plugged_in(str(port), tmp_path)
