"""Guarded memory that begins in a process that already runs, as `with budget(...)` does in a notebook."""

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from port_agent import budget
from port_agent.guard import active_guard, begin_guard, end_guard
from port_agent.guard.memory import MappingKind
from port_agent.intercept.residency.refusals import UnsupportedError
from port_agent.malloc import preload_path
from port_planner.base.process_memory import PAGE_BYTES
from tests.agent.intercept.programs import SCRIPTS

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(preload_path() is None, reason="the allocator was not built (no glibc or no compiler)"),
]

PROGRAM = str(SCRIPTS / "past_operators.py")
BUDGETS = ("2M", "6M", "2M")
MIB = 1 << 20


def run_program(seed: int, budgets: tuple[str, ...], folder: Path) -> tuple[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    done = subprocess.run(
        [sys.executable, PROGRAM, str(seed), *budgets],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(40), marks=pytest.mark.long)], ids=["two", "many"])
def test_whatever_reaches_tensors_past_the_operators_finds_them(seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        expected, _ = run_program(seed, ("none",) * len(BUDGETS), tmp_path)
        printed, figures = run_program(seed, BUDGETS, tmp_path)
        assert printed == expected, f"seed {seed}"
        assert all(int(line) > MIB for line in figures.splitlines()[-len(BUDGETS) :]), f"seed {seed}: {figures}"


def test_tensors_made_before_leave_and_are_ordinary_memory_afterwards(tmp_path: Path) -> None:
    before = torch.arange(1 << 20, dtype=torch.float32)
    address = before.data_ptr()
    with budget(tensors="1M", page_dir=tmp_path) as bound:
        guard = active_guard()
        assert guard is not None and guard.counters().live_bytes >= before.nbytes // 2
        view = before.numpy()
        made = [torch.full((1 << 18,), float(number)) for number in range(8)]
        assert view[-1] == (1 << 20) - 1 and before.data_ptr() == address
        view[0] = 5
        assert before[0] == 5 and bound.report.written_bytes > 0
    assert active_guard() is None and view[0] == 5 and made[7][0] == 7
    del view, before, made
    assert torch.ones(1 << 20).sum() == 1 << 20


def test_a_page_file_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"no page file could be made in .*gone: No such file"):
        budget(tensors="1M", page_dir=tmp_path / "gone").start()
    assert active_guard() is None


def test_the_kernel_finds_a_buffer_that_begins_before_its_first_whole_page(tmp_path: Path) -> None:
    tensor = torch.arange(1 << 18, dtype=torch.float32)
    expected = tensor.numpy().tobytes()
    begin_guard(tmp_path, 1 << 20)
    try:
        guard = active_guard()
        assert guard is not None and guard.adopt(tensor.data_ptr(), tensor.nbytes)
        assert guard.evict(-(-tensor.data_ptr() // PAGE_BYTES) * PAGE_BYTES)
        (tmp_path / "file").write_bytes(memoryview(tensor.numpy()).cast("B"))  # type: ignore[arg-type]  # a buffer
        assert guard.counters().kernel_calls > 0
        assert (tmp_path / "file").read_bytes() == expected
    finally:
        end_guard()


def test_operators_are_intercepted_before_a_mapped_file_may_fill_the_budget(tmp_path: Path) -> None:
    """Its pages come in without any allocation; unseen, they left no memory for tensors."""
    save_file({"w": torch.ones(1 << 20)}, tmp_path / "weights.safetensors")
    small, counted = torch.ones(8), []
    for limit in ("64M", "6M"):
        with budget(tensors=limit, page_dir=tmp_path) as bound:
            weights = load_file(tmp_path / "weights.safetensors")
            before = bound.report.operators
            assert float(small.sum()) == 8
            counted.append(bound.report.operators - before)
            assert float(weights["w"].sum()) == 1 << 20
    assert counted[0] == 0 and counted[1] > 0


def test_written_pages_of_a_file_stay_when_blocks_are_read_in_vain(tmp_path: Path) -> None:
    """They may have been written before they were watched: only pages known to equal the file may leave."""
    (tmp_path / "file").write_bytes(b"f" * 2 * MIB)
    begin_guard(tmp_path, 2 * MIB)
    try:
        with (tmp_path / "file").open("r+b") as file:
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        pages[:5] = b"kept!"
        guard = active_guard()
        assert guard is not None and guard.watch(address, 2 * MIB) is MappingKind.FILE_PAGES
        guard.set_process_limit(64 << 30)
        made = [torch.full((MIB // 4,), float(number)) for number in range(8)]
        for number, tensor in enumerate(made * 3):
            assert tensor.numpy().max() == number % 8
        assert guard.counters().read_bytes > 8 * MIB and pages[:6] == b"kept!f"
        assert guard.take_from_file(address) and pages[:6] == b"kept!f"
        del made
    finally:
        end_guard()
