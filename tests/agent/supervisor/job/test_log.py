"""The log of a job: capped, rotated, followed."""

from pathlib import Path

from port_agent.supervisor.job.log import JobLog, read_log, read_more


def test_job_log_is_capped_and_followed(tmp_path: Path) -> None:
    log = JobLog(tmp_path, 20_000)
    log.note("started", 0.0)
    _, position = read_log(tmp_path, 10)
    log.output(b"half a li", 0.0)
    assert read_more(tmp_path, position) == ("", position)
    log.output(b"ne\nnext\n", 0.0)
    text, position = read_more(tmp_path, position)
    assert text.count("worker:") == 2 and "half a line" in text
    for _ in range(200):
        log.output(b"x" * 300 + b"\n", 0.0)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 22_000
    text, _ = read_log(tmp_path, 3)
    assert len(text.splitlines()) == 3
    assert read_log(tmp_path, 0)[0] == ""
    assert read_more(tmp_path, position)[0]  # after a rotation it starts anew
    assert read_log(tmp_path / "nowhere", 5) == ("", 0)
