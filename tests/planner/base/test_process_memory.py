"""Resident memory is seen where Linux tells it, and where only psutil and getrusage do (macOS)."""

import mmap
import resource
import sys
from array import array
from pathlib import Path

import psutil
import pytest

from port_planner.base import process_memory


@pytest.mark.parametrize("platform", [sys.platform, "darwin"])
def test_a_block_that_is_touched_shows_and_its_peak_stays(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform == "linux" and platform == "darwin":
        monkeypatch.setattr(
            resource,
            "getrusage",
            lambda _: type("Usage", (), {"ru_maxrss": psutil.Process().memory_info().rss}),
        )  # Linux counts it in KiB, macOS in bytes
    monkeypatch.setattr(sys, "platform", platform)
    before = process_memory.resident_bytes()
    touched = mmap.mmap(-1, 32 << 20)  # memory of its own: the heap may have free pages that are resident already
    touched.write(b"x" * (32 << 20))
    assert process_memory.resident_bytes() - before > 24 << 20
    assert process_memory.peak_resident_bytes() >= process_memory.resident_bytes() - (4 << 20)
    touched.close()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak can be measured anew on Linux only")
def test_the_peak_can_be_measured_anew() -> None:
    with mmap.mmap(-1, 64 << 20) as touched:  # memory of its own, as above
        touched.write(b"x" * (64 << 20))
    assert process_memory.peak_resident_bytes() - process_memory.resident_bytes() > 32 << 20
    process_memory.reset_peak()
    assert process_memory.peak_resident_bytes() - process_memory.resident_bytes() < 16 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
def test_the_tightest_control_group_counts_and_its_page_cache_does_not(tmp_path: Path) -> None:
    own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    group = tmp_path / own.removeprefix("0::").lstrip("/")
    group.mkdir(parents=True, exist_ok=True)
    assert process_memory.available_bytes(tmp_path) > 0
    for level, limit in ((tmp_path, "100000"), (group, "70000")):
        (level / "memory.max").write_text(limit)
        (level / "memory.current").write_text("60000")
        (level / "memory.stat").write_text("anon 40000\nactive_file 5000\ninactive_file 15000\n")
    assert process_memory.available_bytes(tmp_path) == 70_000 - 40_000


@pytest.mark.parametrize("platform", [sys.platform, "darwin"])
def test_no_more_is_available_than_the_machine_has(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert 0 < process_memory.available_bytes() <= psutil.virtual_memory().total


@pytest.mark.slow
@pytest.mark.skipif(not process_memory._HUGE_PAGE_BYTES.exists(), reason="huge pages are asked for on Linux only")
def test_what_huge_pages_may_fill_is_the_rest_of_those_that_are_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    before, huge = process_memory.untouched_block_bytes(), int(process_memory._HUGE_PAGE_BYTES.read_text())
    with mmap.mmap(-1, 16 * huge) as hinted, mmap.mmap(-1, 16 * huge) as touched:
        hinted.madvise(mmap.MADV_HUGEPAGE)
        assert process_memory.untouched_block_bytes() - before == 0, "nothing of it is touched"
        touched.madvise(mmap.MADV_NOHUGEPAGE)
        for page in range(3, 9):
            touched[page * huge + huge // 2] = 1
        touched.madvise(mmap.MADV_HUGEPAGE)
        grows = process_memory.untouched_block_bytes() - before
    assert 0 < grows <= 6 * huge, "the kernel may have filled some since"


def test_areas_are_those_that_were_hinted_and_an_untouched_page_of_them_does_not_grow(tmp_path: Path) -> None:
    areas = (
        "7f00-7f80 rw-p 0 00:00 0\nSize: 4 kB\nVmFlags: rd wr hg\n8000-9000 rw-p 0 00:00 0 [heap]\nVmFlags: rd wr nh\n"
    )
    assert list(process_memory._hinted_areas(areas)) == [(0x7F00, 0x7F80)]
    page = process_memory.PAGE_BYTES
    entries = tmp_path / "pagemap"
    entries.write_bytes(array("Q", [0, 0, 0, 0, 1 << 63, 0, 1 << 63 | 5, 1 << 62]).tobytes())
    with entries.open("rb", buffering=0) as pagemap:
        assert [process_memory._untouched(pagemap, start * page, 4 * page) for start in (0, 4)] == [0, 2 * page]
