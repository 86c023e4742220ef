"""Whatever is typed wrong is answered by one line that says what to do."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from port_planner.base.errors import ExitCode
from tests.agent.jobs_small import small_bundle
from tests.agent.live_daemon import CONFIG, ROOT, start_agent
from tests.attack.outcome import Survived
from tests.attack.wrong_inputs import (
    Attempt,
    attempts,
    here,
    junk,
    make_things,
    of_running_agent,
    outside,
    refused,
    run_all,
)


@pytest.fixture
def things(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work in a directory with a few valid inputs and many invalid ones."""
    make_things(tmp_path)
    shutil.copy(small_bundle(), tmp_path / "job.port")
    (tmp_path / "train.py").write_text("x = 1\n")
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield tmp_path


@pytest.mark.long
def test_wrong_arguments_of_every_command(things: Path, survived: Survived) -> None:
    tried = [attempt for attempt in attempts() if attempt.words[0] != "exec"]
    outcome = run_all("wrong arguments", tried, things, refused, here)
    survived(outcome)
    assert outcome.tried > 1000


@pytest.mark.long
def test_wrong_arguments_of_exec(things: Path, survived: Survived) -> None:
    tried = [attempt for attempt in attempts() if attempt.words[0] == "exec"]
    outcome = run_all("wrong arguments of exec", tried, things, refused, outside)
    assert outcome.tried > 60
    survived(outcome)


def test_files_that_are_not_what_their_place_wants(things: Path, survived: Survived) -> None:
    outcome = run_all("junk in files", list(junk()), things, refused, here)
    assert outcome.tried > 50
    survived(outcome)


def test_what_a_running_agent_refuses(
    things: Path, tmp_path_factory: pytest.TempPathFactory, survived: Survived
) -> None:
    root = tmp_path_factory.mktemp("agent")
    (root / "config.toml").write_text(CONFIG)
    there = ("--runtime-dir", str(root / "run"))
    process = start_agent(
        root, "port_agent.cli", "run", "--state-dir", str(root / "state"), *there, "--config", str(root / "config.toml")
    )

    def judge(code: int, out: str, said: str) -> str:
        return refused(code, out, said) or ("no agent" if code == ExitCode.UNREACHABLE else "")

    try:
        tried = [Attempt((*attempt.words, *there)) for attempt in of_running_agent()]
        outcome = run_all("refused by the agent", tried, things, judge, here)
    finally:
        process.terminate()
        process.wait(30.0)
    assert outcome.tried > 100
    survived(outcome)
