"""A result is written by one run at a time, never into the model and never over what is there."""

import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from port_agent.finetuning.inputs.options import FinetuneError, FinetuneOptions
from port_agent.finetuning.inputs.run_date import state_folder
from port_agent.finetuning.result import check_result_place, only_run
from tests.forked import run_forked

_KILLED_RUNS = "tests.agent.finetuning.killed_runs"


@pytest.fixture
def asked(tmp_path: Path) -> FinetuneOptions:
    (tmp_path / "model").mkdir()
    return FinetuneOptions(str(tmp_path / "model"), ("data",), str(tmp_path / "out"))


def test_nothing_is_written_into_the_models_directory(asked: FinetuneOptions, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "model")
    for out in ("model", "model/adapter", "link/adapter", "x/../model"):
        with pytest.raises(FinetuneError, match="inside the model's directory, which is never written to"):
            check_result_place(replace(asked, out=str(tmp_path / out), overwrite=True))


def test_what_is_there_is_replaced_only_where_it_is_asked_for(asked: FinetuneOptions) -> None:
    check_result_place(asked)
    Path(asked.out).mkdir()
    check_result_place(asked)
    (Path(asked.out) / "adapter.bin").touch()
    with pytest.raises(FinetuneError, match="out exists already; give another --out, or --overwrite"):
        check_result_place(asked)
    check_result_place(replace(asked, overwrite=True))


def test_one_run_at_a_time(asked: FinetuneOptions) -> None:
    folder = state_folder(Path(asked.out))
    with only_run(asked):
        assert folder.is_dir()
        with pytest.raises(FinetuneError, match=r"another fine-tuning is writing to .*out"), only_run(asked):
            pass
        with only_run(replace(asked, out=f"{asked.out}-2")):
            pass
    assert not folder.exists(), "nothing is left of a run that kept nothing"
    with only_run(asked):
        (folder / "checkpoint.pt").touch()
    assert folder.is_dir()


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(("what", "step"), [pytest.param("finetune", 7, marks=pytest.mark.long), ("merge", 9)])
def test_wherever_it_is_killed_what_was_there_stays_and_the_same_command_ends_it(
    what: str, step: int, tmp_path: Path
) -> None:
    """Before and after each operation on files, of which every few are tried here."""
    assert run_forked(_KILLED_RUNS, "prepare", str(tmp_path)).returncode == 0
    work = tmp_path / "work"
    out = work / "out"
    work.mkdir()
    whole = run_forked(_KILLED_RUNS, "run", what, str(tmp_path), "0")
    expected, count = _files(out), int(whole.stdout.split()[-1])
    for place in range(3, count + 1, step):
        shutil.rmtree(work)
        work.mkdir()
        if what == "finetune":
            out.mkdir()
            (out / "earlier").write_text("")
        killed = run_forked(_KILLED_RUNS, "run", what, str(tmp_path), str(place))
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        found = _files(out if out.exists() else work / ".out.old")
        assert found in (expected, {"earlier": b""} if what == "finetune" else {})
        if what == "merge" and found == expected:
            continue  # it is there, and a second one is refused
        again = run_forked(_KILLED_RUNS, "run", what, str(tmp_path), "0")
        assert again.returncode == 0, again.stderr
        assert _files(out) == expected and [path.name for path in work.iterdir()] == ["out"]
