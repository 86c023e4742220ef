"""`make check-gpu`'s rows of `exec`, on the simulated card, and without a GPU."""

import pytest
import torch

from benchmarks import gpu_exec
from tests.forked import run_forked
from tests.simulated_card import library, missing


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_exec.main([]) == 0
    assert "no GPU: " in capsys.readouterr().out


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_its_rows_run_on_the_simulated_card() -> None:
    library()
    done = run_forked("tests.card_programs", "measured")
    assert done.returncode == 0, done.stderr
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    within = [found for name, found in said.items() if name.startswith("exec --gpu-ram")]
    assert len(within) == len(gpu_exec.SHARES) and all(
        "bits equal" in found and "came back" in found for found in within
    )
    assert said["two streams"] == "bits equal" and "aten::mul is out of memory" in said["an operator that does not fit"]
    assert "is hidden" in said["overlap"]
    assert "DIFFER" not in done.stdout and "FAILED" not in done.stdout and "WRONG" not in done.stdout
    assert "10 rows ran in" in done.stdout and done.stdout.endswith("not run: none\n0 races\n")
