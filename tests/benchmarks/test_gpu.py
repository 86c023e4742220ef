"""`make check-gpu` without a GPU: it says so; its measurements run on the simulated device."""

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks import gpu
from benchmarks.device_steps import Job
from benchmarks.models import workload
from tests.simulated_device import SimBackend


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA GPU")
def test_without_a_gpu_it_says_so_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 0
    assert "no GPU: " in capsys.readouterr().out


@pytest.mark.own_process
def test_what_it_measures_runs_on_the_simulated_device(tmp_path: Path) -> None:
    backend, out = SimBackend(), io.StringIO()
    console = Console(file=out, width=118, highlight=False)
    links = gpu.speeds(backend, tmp_path, console, 1 << 20)
    assert set(links) == {"host", "file"} and all(rate > 0 for pair in links.values() for rate in pair)
    gpu.overlap(backend, console, 64, 1 << 20)
    gpu.launches(backend, console, 10)
    gpu.check_job(Job("gpt2", lambda: workload("gpt2", small=True), "adamw"), backend, links, tmp_path, console)
    said = out.getvalue()
    assert "GB/s out" in said and "of the shorter is hidden" in said and "eager twice equal" in said
    rows = [line for line in said.splitlines() if " port " in line]
    assert len(rows) == len(gpu.CAPS) and sum("yes" in row for row in rows) >= 2, said
    assert backend.races() == []
