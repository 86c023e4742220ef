"""Guarded memory that begins in a process that already runs, as `with budget(...)` does in a notebook."""

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from port_agent import budget
from port_agent.guard import GuardedMemory, active_guard, begin_guard, end_guard
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


@pytest.fixture
def mapped(tmp_path: Path) -> Iterator[tuple[mmap.mmap, int, GuardedMemory]]:
    """Four MiB of a file, the address of its private mapping, and guarded memory with a limit of two."""
    (tmp_path / "file").write_bytes(b"f" * 4 * MIB)
    with (tmp_path / "file").open("r+b") as file:
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    begin_guard(tmp_path, 2 * MIB)
    try:
        guard = active_guard()
        assert guard is not None
        guard.set_process_limit(64 << 30)
        yield pages, ctypes.addressof(ctypes.c_char.from_buffer(pages)), guard
    finally:
        end_guard()
    assert (tmp_path / "file").read_bytes() == b"f" * 4 * MIB


def _pass_through(guard: GuardedMemory) -> None:
    """Bring in more than the limit, twice, so that what may leave does."""
    made = [torch.full((MIB // 4,), float(number)) for number in range(8)]
    for number, tensor in enumerate(made * 2):
        assert tensor.numpy().max() == number % 8
    assert guard.counters().read_bytes > 4 * MIB


def test_a_mapping_that_was_written_before_it_was_watched_keeps_its_bytes(
    mapped: tuple[mmap.mmap, int, GuardedMemory],
) -> None:
    pages, address, guard = mapped
    pages[:5] = b"kept!"
    assert guard.watch(address, 4 * MIB) is MappingKind.OWN_MEMORY
    _pass_through(guard)
    assert guard.evict(address) and pages[:6] == b"kept!f"
    assert guard.take_from_file(address) and not guard.is_of_file(address)
    _pass_through(guard)
    assert guard.evict(address) and pages[:6] == b"kept!f"


def test_what_is_written_past_the_protection_of_a_files_pages_is_kept(
    mapped: tuple[mmap.mmap, int, GuardedMemory],
) -> None:
    """As a debugger does, or the kernel: no access faults."""
    pages, address, guard = mapped
    assert guard.watch(address, 4 * MIB) is MappingKind.FILE_PAGES and guard.bring(address)
    with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
        memory.seek(address + 7)
        memory.write(b"kept!")
    _pass_through(guard)
    assert pages[:13] == b"fffffffkept!f" and not guard.is_of_file(address)
    assert guard.evict(address) and pages[:13] == b"fffffffkept!f"
    pages[0:1] = b"k"
    assert guard.evict(address) and pages[:13] == b"kffffffkept!f"


def test_pages_that_equal_their_file_leave_and_come_as_blocks_do(mapped: tuple[mmap.mmap, int, GuardedMemory]) -> None:
    pages, address, guard = mapped
    assert guard.watch(address, 4 * MIB) is MappingKind.FILE_PAGES and guard.is_of_file(address)
    written, faults = guard.counters().written_bytes, guard.counters().read_faults
    assert set(pages[:: 1 << 16]) == set(b"f")
    assert guard.counters().read_faults > faults, "they were evicted when they were known"
    assert guard.evict(address) and guard.bring(address) and guard.is_of_file(address)
    assert guard.counters().written_bytes == written, "their place is the file"
    pages[MIB : MIB + 5] = b"kept!"  # read before: a clean block
    assert guard.evict(address)
    pages[3 * MIB : 3 * MIB + 5] = b"again"  # one that is away
    assert not guard.is_of_file(address)
    _pass_through(guard)
    assert guard.evict(address) and guard.counters().written_bytes > written
    assert (pages[MIB - 1 : MIB + 6], pages[3 * MIB - 1 : 3 * MIB + 6]) == (b"fkept!f", b"fagainf")
