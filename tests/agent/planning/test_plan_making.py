"""A bundle whose pages go to several media, made and trained as a user does it."""

import json
from pathlib import Path

import pytest

from tests.agent.cli.plan.small_script import run

PAGING_SCRIPT = """
import torch
from torch import nn
from torch.nn import functional
from port_planner.job import TrainingJob

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
        report = json.loads(done.stdout)
        written = [medium["written_bytes"] for medium in report["media"]]
        assert written == [0] if not media else min(written) > 8 << 20
        done = run(
            tmp_path, "train", "job.port", "--steps", "3", "--state-dir", f"state-{ram}", "--json", "--digest", *media
        )
        assert done.returncode == 0, done.stderr
        digests.append(json.loads(done.stdout.splitlines()[-1])["digest"])
        ram = f"{(report['floor_bytes'] >> 20) + _ABOVE_FLOOR_MIB}M"  # the process takes more where its code lies in large folios
    assert digests[0] == digests[1]
