"""What README begins with, typed as it stands: a script, a loop, a language model, and the service with a bundle."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from port_agent.cli import main
from port_agent.control import places
from tests.agent.finetuning.tiny_model import TEXT, make_model
from tests.docs.pages import ROOT, blocks
from tests.waiting import until

pytestmark = [pytest.mark.process, pytest.mark.slow]

TRAIN = """\
import torch
from torch import nn
from port_agent import TrainingJob

def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x), y)

def port_job():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    data = torch.randn(16, 16), torch.arange(16) % 4
    return TrainingJob(model, loss_of, torch.optim.AdamW(model.parameters()), data, 4)

if __name__ == "__main__":
    job = port_job()
    for _ in range(3):
        loss_of(job.model, *job.data).backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
    torch.save(job.model.state_dict(), "weights.pt")
"""


RUN_BY = {
    "python3 -m venv": "tests/systemd/test_release.py::test_the_wheel_installs_where_nothing_of_ours_is_and_trains",
    "pip install": "tests/systemd/test_release.py::test_the_wheel_installs_where_nothing_of_ours_is_and_trains",
    "hf download": "",  # of another project, from a network
    "sudo apt": "",
    "port-agent": "tests/docs/test_commands.py::test_each_command_of_the_documents_is_understood",
    "port-agent exec": "tests/docs/test_readme.py::test_the_first_commands",
    "port-agent finetune": "tests/docs/test_readme.py::test_the_first_commands",
    "port-agent plan": "tests/docs/test_readme.py::test_the_service",
    "port-agent run": "tests/docs/test_readme.py::test_the_service",
    "port-agent job": "tests/docs/test_readme.py::test_the_service",
    "port-agent status": "tests/docs/test_readme.py::test_the_service",
    "sudo deploy/install.sh": "tests/systemd/test_install.py::test_a_checkout_is_built_and_installed",
    "make demo": "tests/docs/test_readme.py::test_the_demos",
    "make demo-llm": "tests/docs/test_readme.py::test_the_demos",
    "make docs": "tests/docs/test_reference.py::test_the_site_builds_without_a_warning",
    "make check-": "",  # these run tests, on a machine with root or with a GPU
    "python -m benchmarks": "tests/docs/test_readme.py::test_each_benchmark_knows_its_options",
}
"""Beginnings of README's commands, and the test that runs such a command: the longest beginning counts."""


def commands() -> list[str]:
    """Return the commands of README: lines to type, and those within its sentences."""
    text = (ROOT / "README.md").read_text()
    lines = [line.partition("  #")[0] for block in blocks(ROOT / "README.md", ("",)) for line in block.splitlines()]
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    programs = ("python", "pip ", "hf ", "sudo ", "make ", "port-agent ")
    return [command.strip() for command in (*lines, *inline) if command.startswith(programs)]


def test_each_command_is_run_by_a_test() -> None:
    assert len(commands()) > 20
    not_run = [command for command in commands() if not command.startswith(tuple(RUN_BY))]
    assert not not_run
    for test in filter(None, RUN_BY.values()):
        path, _, name = test.partition("::")
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.M), test
    assert not [beginning for beginning in RUN_BY if not any(one.startswith(beginning) for one in commands())]


@pytest.mark.parametrize("command", [command for command in commands() if command.startswith("python -m benchmarks")])
def test_each_benchmark_knows_its_options(command: str) -> None:
    """A figure takes minutes to hours to measure; `tests/test_documents.py` imports each of these programs."""
    module, *options = command.removeprefix("python -m ").split()
    source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
    assert not [option for option in options if option.startswith("--") and f'"{option}"' not in source]


@pytest.mark.long
@pytest.mark.parametrize("module", ["examples.demo", "examples.demo_llm"])
def test_the_demos(module: str) -> None:
    assert subprocess.run([sys.executable, "-m", module], cwd=ROOT).returncode == 0


def port_agent_lines(index: int) -> list[list[str]]:
    """Return the words of the commands in one of README's blocks."""
    lines = blocks(ROOT / "README.md", ("",))[index].splitlines()
    return [line.partition("#")[0].split()[1:] for line in lines if line.startswith("port-agent ")]


def their_script(folder: Path) -> None:
    """Put a small script where README has its example."""
    script = folder / "examples" / "shakespeare" / "train.py"
    script.parent.mkdir(parents=True)
    script.write_text(TRAIN)


def typed(folder: Path, words: list[str]) -> str:
    """Run a command of README and return what it printed."""
    command = [sys.executable, "-P", "-m", "port_agent.cli", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.usefixtures("torch_forks")
def test_the_first_commands(tmp_path: Path) -> None:
    their_script(tmp_path)
    make_model(tmp_path / "SmolLM2-135M")
    (tmp_path / "notes.txt").write_text(TEXT * 40)
    (script,), (finetune,) = port_agent_lines(1), port_agent_lines(2)
    typed(tmp_path, script)
    assert (tmp_path / "weights.pt").is_file()
    typed(tmp_path, finetune)
    assert (tmp_path / "my-adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.usefixtures("torch_forks")
def test_the_loop(tmp_path: Path) -> None:
    (code,) = blocks(ROOT / "README.md", ("python",))
    step = "loss_of(job.model, *batch).backward(), job.optimizer.step()"
    job = TRAIN.partition("if __name__")[0] + "job = port_job()\nloader = [job.data] * 2\n"
    (tmp_path / "loop.py").write_text(job + code.replace("...", step))
    command = [sys.executable, "-P", "loop.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "peak" in done.stdout


def test_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run, plan, submit, run_now, result = port_agent_lines(3)
    their_script(tmp_path)
    for name in ("STATE_DIRECTORY", "RUNTIME_DIRECTORY"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
        (tmp_path / name.lower()).mkdir()
    monkeypatch.setattr(places, "SYSTEM_RUNTIME_DIR", tmp_path / "runtime_directory")
    monkeypatch.chdir(tmp_path)
    assert main(plan) == 0
    words = [word for word in run if word != "&"]
    daemon = subprocess.Popen([sys.executable, "-P", "-m", "port_agent.cli", *words], cwd=tmp_path)
    try:
        until(lambda: list(tmp_path.rglob("*.sock")))
        assert main(submit) == 0
        assert main(["status"]) == 0
        assert main(run_now) == 0
        until(lambda: main(["job", "job"]) == 0 and "finished" in capsys.readouterr().out)
        assert main(result) == 0
        assert (tmp_path / "weights.safetensors").is_file()
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.wait()
