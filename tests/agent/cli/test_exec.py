"""`port-agent exec`: what it refuses, in one line, and what its help says."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from port_agent.cli import exec as exec_command
from port_agent.cli import main
from port_agent.control.client import ControlClient, ControlError
from port_agent.energy.media import FlashPrices
from port_planner.base.errors import ExitCode
from tests.agent.intercept.programs import followed, written


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ram", "3x", "--", "train.py"), "cannot read the size '3x'"),
        (("--ram", "0", "--", "train.py"), "less than one byte"),
        (("--ram", "1G", "--tensors", "4K", "--", "train.py"), "not allowed with"),
        (("--ram", "1G"), "no program"),
        (("--ram", "1G", "--", "-m"), "name of a module"),
        (("--ram", "1G", "--", "python"), "python alone is not a program"),
        (("--ram", "1G", "--", "python", "-u", "train.py"), "-u is not a program"),
        (("--ram", "1G", "--", "/nowhere/bin/python3", "train.py"), "/nowhere/bin/python3 may be another Python than"),
        (("--ram", "1G", "--", "-x"), "-x is not a program"),
        (("--ram", "1G", "--", "nowhere.py"), "cannot open nowhere.py: No such file"),
        (("--ram", "1G", "--page-dir", "nowhere", "--", "train.py"), "choose another --page-dir"),
        (
            ("--ram", "1G", "--report", "nowhere/r.json", "--", "train.py"),
            "cannot write nowhere/r.json: No such file or directory",
        ),
        (("--ram", "1G", "--cpus", "9999", "--", "train.py"), "--cpus 9999"),
        (("--ram", "1G", "--write-limit", "0", "--", "train.py"), "less than one byte"),
        (("--ram", "1G", "--step-deadline", "soon", "--", "train.py"), "'soon' is not a valid duration"),
        (("--ram", "1G", "--writes-per-step", "x", "--", "train.py"), "cannot read the size 'x'"),
        (("--", "train.py"), "no budget; give --ram SIZE"),
        (("--gpu-ram", "4G", "--gpu-tensors", "4G", "--", "train.py"), "not allowed with argument"),
        (
            ("--ram", "1G", "--gpu-ram", "4G", "--guard-only", "--", "train.py"),
            "--gpu-ram: these need operators to be intercepted",
        ),
    ],
)
def test_wrong_arguments_are_one_line(
    words: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    written(tmp_path, "import torch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.execve", lambda *became: pytest.fail(f"it runs: {became}"))
    code: object
    try:
        code = main(["exec", *words])
    except SystemExit as ended:  # of the parser
        code = ended.code
    output, errors = capsys.readouterr()
    assert (code, output) == (2, "")
    assert said in errors and errors.count("\n") == 1


@pytest.mark.process
def test_a_budget_below_the_process_itself_is_one_line(tmp_path: Path) -> None:
    written(tmp_path, "import torch")
    words = [sys.executable, "-m", "port_agent.cli", "exec", "--ram", "10M", "--", "train.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "10.0 MiB" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.process
@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs at /dev/shm")
def test_pages_in_ram_are_refused(tmp_path: Path) -> None:
    written(tmp_path, "")
    refused = followed("train.py", folder=tmp_path, bound=("--ram", "1G", "--page-dir", "/dev/shm"))
    assert refused.code == 2 and "itself in RAM" in refused.ours[0]


@pytest.mark.process
@pytest.mark.sample(1)
@pytest.mark.parametrize("python", ["python", "python3.11", sys.executable])
def test_the_interpreter_may_stand_before_the_program(python: str, tmp_path: Path) -> None:
    written(tmp_path, "import sys, torch\nprint(sys.argv)")
    done = followed(python, "train.py", "-x", folder=tmp_path, bound=("--tensors", "1G"))
    assert done.output == "['train.py', '-x']\n"


@pytest.mark.process
def test_cpus_are_those_asked_for(tmp_path: Path) -> None:
    written(tmp_path, "import torch, os\nprint(torch.get_num_threads(), len(os.sched_getaffinity(0)))")
    done = followed("train.py", folder=tmp_path, bound=("--tensors", "1G", "--cpus", "1"))
    assert done.output == "1 1\n"


@pytest.mark.process
def test_flash_is_priced_as_its_owner_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, "import torch")
    config = tmp_path / "config.toml"
    config.write_text("[energy]\nflash_endurance_bytes = 1_000_000\nflash_price = 100\nprice_per_kwh = 0.25\n")
    asked: list[FlashPrices] = []
    became: list[list[str]] = []

    def priced(page_dir: Path, prices: FlashPrices) -> float:
        asked.append(prices)
        return 0.5

    monkeypatch.setattr("port_agent.cli.exec.wear_joules_per_byte", priced)
    monkeypatch.setattr("os.execve", lambda path, command, environment: became.append(command))
    program = ["--config", str(config), "--", str(tmp_path / "train.py")]
    main(["exec", "--tensors", "1G", *program])
    assert asked == [FlashPrices(1_000_000, 100.0, 0.25)]
    assert '"wear_joules": 0.5' in " ".join(became[0])
    config.write_text("[energy]\nflash_price = -1\n")
    refused = followed("train.py", folder=tmp_path, bound=("--tensors", "1G", "--config", str(config)))
    assert refused.code == ExitCode.CONFIG and "flash_price" in refused.ours[0]


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["exec", "--help"])
    said = capsys.readouterr().out
    for phrase in ("unchanged", "-- train.py", "-m my_package.train", "--page-dir", "how much to give"):
        assert phrase in said


def test_an_agent_that_is_being_restarted_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now, answers = [0.0], list[ControlError | None]()

    def get(client: ControlClient, path: str) -> None:
        if (error := answers.pop(0)) is not None:
            raise error

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(ControlClient, "get", get)
    monkeypatch.setattr("port_agent.cli.exec.time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    absent, refused = ControlError("no agent is listening", is_absent=True), ControlError("you may not use it")
    answers += [absent, absent, None]
    assert exec_command._agent_socket(tmp_path, 1) == tmp_path / "control.sock"
    assert capsys.readouterr().err == "port-agent: no agent is listening; waiting 15 s for it\n"
    for place, errors in ((tmp_path, [refused]), (tmp_path / "stopped", [absent]), (tmp_path, [absent] * 31)):
        answers[:] = errors
        with pytest.raises(ControlError):
            exec_command._agent_socket(place, 1)
        assert answers == []
