"""Bundles over several media."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agent.cli import main
from tests.agent.cli.plan.small_script import SCRIPT, run, run_forked_plan


@pytest.mark.long
def test_several_media(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    where = ["--page-dir", "card", "--page-dir", "stick"]
    words = ["train.py", "--ram", "700M", "-o", "job.port", "--verify", "0", "--strategy", "greedy", "--json"]
    done = run_forked_plan(tmp_path, *words, *where, "--cpus", "1")
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
from agent.cli import main
code = main(["plan", "train.py", "--ram", "700M", "--threads", "1", "--flash-life", "3y", "--medium", "disk"])
sys.exit(f"{code} {'torch' in sys.modules}")
"""


def test_what_the_arguments_forbid_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "-c", REFUSED], cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "2 False", done.stderr


PAGING_SCRIPT = """
import torch
from torch import nn
from torch.nn import functional
from planner.job import TrainingJob

def port_job():
    torch.manual_seed(0)
    model = nn.Sequential(*[part for _ in range(10) for part in (nn.Linear(512, 512), nn.Tanh())], nn.Linear(512, 4))
    data = [torch.randn(8192, 512), torch.randint(0, 4, (8192,))]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return TrainingJob(model, lambda m, x, y: functional.cross_entropy(m(x), y), optimizer, data, 8192)
"""


_ABOVE_FLOOR_MIB = 62


@pytest.mark.long
def test_pages_go_to_several_media_and_the_numbers_stay(tmp_path: Path) -> None:
    """What lives within a step goes to the faster second medium, weights and optimizer state to the first."""
    (tmp_path / "train.py").write_text(PAGING_SCRIPT)
    where = ["--page-dir", "card", "--page-dir", "stick"]
    digests, ram = [], "800M"
    for media in ([], where):
        words = ["train.py", "--ram", ram, "-o", "job.port", "--strategy", "greedy", "--flash-write", "50M", "--json"]
        done = run(tmp_path, "plan", *words, *media)
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        written = [medium["written_bytes"] for medium in told["media"]]
        assert written == [0] if not media else min(written) > 8 << 20
        done = run(
            tmp_path, "train", "job.port", "--steps", "3", "--state-dir", f"state-{ram}", "--json", "--digest", *media
        )
        assert done.returncode == 0, done.stderr
        digests.append(json.loads(done.stdout.splitlines()[-1])["digest"])
        ram = f"{(told['floor_bytes'] >> 20) + _ABOVE_FLOOR_MIB}M"  # the process takes more where its code lies in large folios
    assert digests[0] == digests[1]
