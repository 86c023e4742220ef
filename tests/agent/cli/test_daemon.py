"""The command line of the agent, from submit to result, on a running one."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from port_agent.cli import main
from port_agent.control.client import ControlError
from port_agent.control.http import SOCKET_NAME
from tests.agent.live_daemon import BUNDLE, ROOT, daemon
from tests.their_modules import NOT_IMPORTED, fill_with_modules
from tests.waiting import until


def first_lines(*words: str, number: int) -> str:
    """Return the first lines of a command that does not end by itself, as a pipe gets them."""
    command = [sys.executable, "-m", "port_agent.cli", *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(number)]
        process.kill()
    return "".join(lines)


@pytest.mark.process
def test_modules_in_the_working_directory_are_not_imported_by_submit(tmp_path: Path) -> None:
    fill_with_modules(tmp_path, NOT_IMPORTED)
    bundle = tmp_path / "Garden Birds.json"
    bundle.write_text(json.dumps(BUNDLE))
    command = [sys.executable, str(Path(sys.executable).with_name("port-agent")), "submit", str(bundle)]
    with daemon(tmp_path):
        done = subprocess.run(
            [*command, "--runtime-dir", str(tmp_path / "run")], cwd=tmp_path, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr
    assert "is queued" in done.stdout


@pytest.mark.process
def test_the_command_line_from_submit_to_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ["--runtime-dir", str(tmp_path / "run")]

    def run(*words: str) -> str:
        assert main([*words, *place]) == 0
        return capsys.readouterr().out

    bundle = tmp_path / "Garden Birds.json"
    bundle.write_text(json.dumps(BUNDLE))
    with daemon(tmp_path):
        assert "Job 1 (garden-birds) is queued" in run("submit", str(bundle))
        log = run("logs", "-f", "1")  # ends when the job is over
        assert "worker starts" in log
        assert json.loads(run("job", "1", "--json"))["state"] == "finished"
        out = tmp_path / "weights"
        run("result", "garden-birds", "-o", str(out))
        assert json.loads(out.read_text())["step"] == BUNDLE["steps"]
        assert "finished" in run("jobs")
        assert "idle: no jobs" in run("status")
        assert first_lines("status", "--watch", *place, number=24).count("idle: no jobs") >= 2
        assert "No job trains until `port-agent job resume`" in run("pause")
        assert "Job 2 (held) is queued" in run("submit", str(bundle), "--name", "held", "--deadline", "8h")
        assert "waiting: paused by you" in run("status")
        why = run("why", "--since", "yesterday")
        assert why.index("the agent started") < why.index("training") < why.index("paused by you")
        assert json.loads(run("why", "--json"))["entries"][-1]["codes"] == ["user"]
        assert "has priority 7" in run("priority", "held", "7")
        assert "no deadline" in run("deadline", "2", "none")
        assert "is paused" in run("pause", "held")
        assert "is queued" in run("resume", "held")
        assert "is cancelled" in run("cancel", "2")
        assert "Training resumes" in run("resume")
        assert "until" in run("not-now", "--for", "2h")
        assert "is queued" in run("submit", str(bundle), "--name", "wanted")
        assert "runs now, before all others" in run("run-now", "wanted", "--for", "1h")
        assert "worker starts" in run("logs", "-f", "wanted")
        assert str(tmp_path / "config.toml") in run("reload")
        assert json.loads(run("status", "--json"))["state"] == "idle"
        jobs = json.loads(run("jobs", "--all", "--json"))["jobs"]
        assert [job["state"] for job in jobs] == ["finished", "cancelled", "finished"]
        main(["doctor", "--no-flash", *place])
        assert "state directory" in capsys.readouterr().out
    assert main(["status", *place]) == 3
    assert "no agent is running" in capsys.readouterr().err


@pytest.mark.process
def test_feeding_a_job_that_waits_for_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ["--runtime-dir", str(tmp_path / "run")]
    bundle = tmp_path / "birds.json"
    bundle.write_text(json.dumps(BUNDLE))
    (tmp_path / "morning.txt").write_text("0.1 0.2 0.3")
    with daemon(tmp_path) as client:
        assert main(["submit", str(bundle), "--inbox", "--epochs", "1", *place]) == 0
        assert "inbox/birds" in capsys.readouterr().out
        assert main(["feed", "birds", str(tmp_path / "morning.txt"), *place]) == 0
        assert "1 files, 11 bytes" in capsys.readouterr().out
        until(lambda: client.get("/v1/jobs/birds")["rounds"] >= 1)
        with pytest.raises(ControlError, match="not a valid plain file name"):
            client.upload("/v1/inbox/birds/.hidden", tmp_path / "morning.txt")


def test_an_agent_that_gives_no_answer_is_not_called_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A doctor on a slow board takes longer than other answers: torch alone is ten seconds."""
    monkeypatch.setattr("port_agent.health.doctor.examine", lambda *place, **wish: [])
    monkeypatch.setattr("port_agent.cli.daemon._DOCTOR_PATIENCE_S", 0.05)
    doctor = ["doctor", "--no-flash", "--runtime-dir", str(tmp_path), "--json"]
    findings = []
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(str(tmp_path / SOCKET_NAME))
        busy.listen()
        assert main(doctor) == 1
        findings.append(json.loads(capsys.readouterr().out)["checks"][0]["finding"])
    (tmp_path / SOCKET_NAME).unlink()
    assert main(doctor) == 1
    findings.append(json.loads(capsys.readouterr().out)["checks"][0]["finding"])
    assert findings == ["no answer", "not running"]


@pytest.mark.slow
def test_completion_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in ("bash", "zsh"):
        assert main(["completion", shell]) == 0
        assert "submit" in capsys.readouterr().out


def test_a_configuration_that_is_refused_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.toml").write_text("[when]\nidle_for = 'soon'\n")
    words = ["run", "--state-dir", str(tmp_path / "s"), "--runtime-dir", str(tmp_path / "r")]
    assert main([*words, "--config", str(tmp_path / "bad.toml")]) == 78
    assert "bad.toml:2: when.idle_for" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([*words, "--config", str(tmp_path / "none.toml")])


def test_a_socket_path_that_is_too_long_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deep = tmp_path / ("x" * 120)
    assert main(["run", "--state-dir", str(tmp_path / "s"), "--runtime-dir", str(deep)]) == 1
    assert "another --runtime-dir" in capsys.readouterr().err


def test_boards_are_for_microcontroller_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = tmp_path / "b.port"
    bundle.write_text("{}")
    assert main(["submit", str(bundle), "--simulate", "--runtime-dir", str(tmp_path)]) == 2
    assert "--kind mcu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["--boards", "/dev/a,/dev/b"], "add --kind mcu"),
        (["--kind", "mcu", "--boards", "/dev/a,/dev/b", "--steps", "5"], "leave out --steps"),
        (["--kind", "mcu", "--boards", "/dev/a,/dev/b", "--port", "/dev/a"], "leave out --port"),
        (["--kind", "mcu", "--boards", "/dev/a,/dev/a"], "name each board once"),
        (["--kind", "mcu", "--boards", "A1,"], "name each board once"),
        (["--kind", "mcu", "--boards", "all", "--simulate"], "with --simulate give a number"),
    ],
)
def test_boards_that_cannot_share_a_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], remedy: str
) -> None:
    bundle = tmp_path / "b.port"
    bundle.write_text("{}")
    assert main(["submit", str(bundle), *words, "--runtime-dir", str(tmp_path)]) == 2
    assert remedy in capsys.readouterr().err
