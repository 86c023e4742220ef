"""Plain steps within a device's budget: what autograd saves leaves where that is short, and what
does not fit so is refused.
"""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from port_agent.backend.cpu import CpuBackend
from port_agent.prepare.device_headroom import DeviceTooSmallError, within_device
from port_agent.prepare.pools import Pools
from port_planner.job import TrainingJob
from tests.simulated_device import CONTEXT_BYTES, NAME, SimBackend

pytestmark = pytest.mark.own_process

MIB = 1 << 20
SAVED = 10
"""Tensors of a MiB that the step saves."""


def job_on(kind: str) -> TrainingJob:
    model = nn.Linear(4, 4).to(kind)
    return TrainingJob(
        model, lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters(), lr=0.1), [torch.zeros(4, 4)], 2
    )


def step(backend: SimBackend, peaks: list[int]) -> Callable[[], float]:
    def run() -> float:
        gc.collect()
        before = backend.allocated_bytes()
        h = torch.ones(MIB // 4).to(NAME).requires_grad_()
        for _ in range(SAVED):
            h = torch.tanh(h)
        h.sum().backward()
        peaks.append(backend.peak_bytes() - before)
        return 1.0

    return run


def run(backend: SimBackend, peaks: list[int], free_bytes: int) -> float:
    pools = Pools(1 << 30, CONTEXT_BYTES + free_bytes, CONTEXT_BYTES + free_bytes)
    return within_device(step(backend, peaks), "the step", job_on(NAME), backend, pools)


def test_what_is_saved_leaves_only_where_the_device_is_short_of_memory() -> None:
    backend, peaks = SimBackend(), list[int]()
    assert run(backend, peaks, 100 * MIB) == run(backend, peaks, 8 * MIB) == 1.0
    assert len(peaks) == 2 and peaks[1] < peaks[0]


def test_where_half_was_too_much_all_of_it_leaves() -> None:
    backend, peaks = SimBackend(), list[int]()
    assert run(backend, peaks, 6 * MIB) == 1.0
    assert len(peaks) == 2 and peaks[1] <= 6 * MIB < peaks[0]


def test_what_does_not_fit_so_is_refused_with_the_bytes_it_took() -> None:
    backend, peaks = SimBackend(), list[int]()
    with pytest.raises(
        DeviceTooSmallError, match=r"the step took .* leaves 2.0 MiB besides 3.0 MiB .* --recording-gpu-ram"
    ) as refused:
        run(backend, peaks, 2 * MIB)
    asked = int(str(refused.value).partition("--recording-gpu-ram ")[2].partition("M")[0]) * MIB
    assert run(backend, peaks, asked - CONTEXT_BYTES) == 1.0


def test_on_the_cpu_steps_just_run() -> None:
    assert within_device(lambda: 7, "a step", job_on("cpu"), CpuBackend(), Pools(1 << 30)) == 7
