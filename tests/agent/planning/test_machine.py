"""What the command line says of the machine: media of the page directories, numbers of threads, what forbids what."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from port_agent.cli import main
from port_agent.planning.machine import check_request, thread_counts
from port_agent.planning.request import PlanRequest, RequestError
from tests.agent.cli.plan.small_script import SCRIPT, run, run_forked


@pytest.mark.long
def test_several_media(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    where = ["--page-dir", "card", "--page-dir", "stick"]
    words = ["train.py", "--ram", "700M", "-o", "job.port", "--verify", "0", "--strategy", "greedy", "--json"]
    done = run_forked(tmp_path, "plan", *words, *where, "--cpus", "1")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["media"]) == 2
    done = run(tmp_path, "train", "job.port", "--steps", "2", *where, "--cpus", "1")
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    words += ["--threads", "1"]  # cores are those of this process
    assert main(["plan", *words, *where, "--board", "pi5"]) == 2
    assert "one medium" in capsys.readouterr().err
    if Path("/dev/shm").is_dir():
        assert main(["plan", *words, *where, "--page-dir", "/dev/shm/port-agent-pages"]) == 2
        assert "is itself in RAM (tmpfs)" in capsys.readouterr().err


REFUSED = """
import sys
from port_agent.cli import main
code = main(["plan", "train.py", "--ram", "700M", "--threads", "1", "--flash-life", "3y", "--medium", "disk"])
sys.exit(f"{code} {'torch' in sys.modules}")
"""


@pytest.mark.process
def test_what_the_arguments_forbid_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "-c", REFUSED], cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "2 False", done.stderr


def asked(**settings: Any) -> PlanRequest:
    return PlanRequest(script=Path("train.py"), out=Path("job.port"), ram_bytes=1 << 30, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"step_joules": 1.0}, "--step-joules limits what --sparse-update trains"),
        ({"board": "pi5", "device": "cuda"}, "the GPU of a board that is not available"),
        ({"solve_on": "any", "strategy": "greedy"}, "a greedy plan takes only a moment here"),
        ({"solve_on": "any", "iterations": 9}, "a paired device searches for --time-limit seconds"),
        ({"place": "cpu:1,cpu:2", "threads": 2}, "--threads and --place exclude each other"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        check_request(asked(**settings))


def test_threads_are_those_that_somebody_set_else_one_for_a_board_or_beside_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert thread_counts(asked(threads=3, board="pi5"), set_by_script=True, on_device=True) == (3,)
    assert thread_counts(asked(board="pi5"), set_by_script=False, on_device=False) == (1,)
    assert thread_counts(asked(), set_by_script=False, on_device=True) == (1,)
    tried = thread_counts(asked(), set_by_script=False, on_device=False)
    assert tried[0] == 1 and tried[-1] == len(os.sched_getaffinity(0))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert len(thread_counts(asked(board="pi5"), set_by_script=False, on_device=True)) == 1
