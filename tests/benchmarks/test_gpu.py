"""`make check-gpu` without a GPU: it says so; its measurements run on the simulated device."""

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks import gpu
from benchmarks.device_steps import Job, captured, plain_steps, trained_by
from benchmarks.gpu_jobs import METHODS, gpu_jobs
from benchmarks.models import Workload, workload
from port_agent.backend.cpu import CpuBackend
from port_planner.ir.plan import Plan
from tests.simulated_device import SimBackend


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA GPU")
def test_without_a_gpu_it_says_so_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 0
    assert "no GPU: " in capsys.readouterr().out


@pytest.mark.own_process
def test_what_it_measures_runs_on_the_simulated_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, out = SimBackend(), io.StringIO()
    monkeypatch.setattr(gpu, "PLAN_SECONDS", 3.0)
    monkeypatch.setattr(gpu, "CAPS", (1.0, 0.6))
    monkeypatch.setattr(gpu, "METHODS", METHODS[:-1])  # torch's compiler does not know the device
    console = Console(file=out, width=118, highlight=False)
    links = gpu.speeds(backend, tmp_path, console, 1 << 20)
    assert set(links) == {"host", "file"} and all(rate > 0 for pair in links.values() for rate in pair)
    gpu.overlap(backend, console, 64, 1 << 20)
    gpu.launches(backend, console, 10)
    asked: list[str] = []
    monkeypatch.setattr(gpu, "repeat_kernels", asked.append)
    job = Job("gpt2", lambda: asked.append("a step") or workload("gpt2", small=True), "adamw")
    gpu.check_job(job, backend, links, tmp_path, console)
    assert asked[:2] == [backend.kind, "a step"], (
        "kernels that repeat, before the first step that others are compared with"
    )
    said = out.getvalue()
    assert "GB/s out" in said and "of the shorter is hidden" in said and "eager twice equal" in said
    rows = [line for line in said.splitlines() if " port " in line]
    assert len(rows) == len(gpu.CAPS) and sum("yes" in row for row in rows) >= 2, said
    for method in METHODS[:-1]:
        assert sum(f"│ {method.name} " in line for line in said.splitlines()) == len(gpu.CAPS), said
    capture = captured(job, backend.kind)
    costs = gpu.costs_of(capture, links, 1 << 30)
    assert gpu.first_unequal(job, capture, Plan(), costs, backend, tmp_path / "same") == ""
    weight = capture.tensors["parameter/transformer.h.1.mlp.c_fc.weight"]
    assert isinstance(weight, torch.Tensor)
    weight.view(torch.float32)[0] += 1
    told = gpu.first_unequal(job, capture, Plan(), costs, backend, tmp_path / "other")
    assert told.startswith("aten.addmm (operator "), told
    assert backend.races() == []


@pytest.mark.own_process
def test_the_first_cap_is_what_plain_pytorchs_allocator_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, out, reserved = SimBackend(), io.StringIO(), 64 << 20
    monkeypatch.setattr(gpu, "CAPS", (1.0,))
    monkeypatch.setattr(gpu, "METHODS", METHODS[:1])
    monkeypatch.setattr(torch.get_device_module(backend.kind), "max_memory_reserved", lambda: reserved, raising=False)
    limits: list[int | None] = []
    monkeypatch.setattr(SimBackend, "limit", lambda _, nbytes: limits.append(nbytes))

    def make() -> Workload:
        torch.manual_seed(0)
        return Workload(
            torch.nn.Linear(8, 4), lambda model, x: model(x).square().sum(), lambda i: (torch.full((2, 8), 1.0 + i),)
        )

    console = Console(file=out, width=118, highlight=False)
    gpu.check_job(Job("small", make, "sgd"), backend, {"host": (1e9, 1e9), "file": (1e9, 1e9)}, tmp_path, console)
    assert limits[0] == reserved, "a cap counts gaps between tensors, too"
    assert out.getvalue().count("yes") == 2, out.getvalue()


def test_each_job_has_a_small_one_of_its_kind_that_trains() -> None:
    for job in gpu_jobs(small=True):
        made = job.make()
        loss = made.loss_fn(made.model, *made.batch(0))
        loss.backward()
        trained_by(job, made.model).step()
        assert torch.isfinite(loss), job.name


def test_checkpointing_and_saving_on_the_cpu_leave_the_numbers_alone() -> None:
    job = Job("gpt2", lambda: workload("gpt2", small=True), "adamw")
    runs = [plain_steps(job, CpuBackend(), 2, method.around, method.adapt) for method in METHODS[:-1]]
    assert not runs[0].difference(runs[1]) and not runs[0].difference(runs[2])
