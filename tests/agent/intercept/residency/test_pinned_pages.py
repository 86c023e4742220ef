"""Pages in pinned memory; that copies are in order is judged on the simulated card (`test_device_pool`)."""

import pytest
import torch

from port_agent.backend.cpu import CpuBackend
from port_agent.intercept.residency.pinned_pages import PINNED_CHUNK_BYTES, PinnedPages


def test_a_page_brings_back_what_left_and_its_memory_is_used_again() -> None:
    pages = PinnedPages(CpuBackend(), 4 * PINNED_CHUNK_BYTES)
    contents = (torch.arange(2 * PINNED_CHUNK_BYTES + 3000) % 251).to(torch.uint8)
    page = pages.take(contents.numel())
    assert page is not None
    out = pages.copy_out(page, contents)
    assert out.done()
    out.landed()
    found = torch.zeros_like(contents)
    pages.copy_in(page, found).landed()
    assert torch.equal(found, contents)
    assert [chunk.numel() for chunk in page.chunks] == [PINNED_CHUNK_BYTES, PINNED_CHUNK_BYTES, 1 << 12]
    assert pages.take(2 * PINNED_CHUNK_BYTES) is None, "more than may be pinned"
    pages.give_back(page)
    assert pages.take(2 * PINNED_CHUNK_BYTES) is not None


def test_small_pages_share_a_chunk() -> None:
    pages = PinnedPages(CpuBackend(), 1 << 20)
    taken = [pages.take(1000 + k % 24) for k in range(1 << 10)]
    assert all(page is not None for page in taken) and pages.take(1) is None


def test_where_no_memory_can_be_pinned_there_is_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refuse(_: CpuBackend, nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        raise RuntimeError("CUDA error: out of memory")

    pages = PinnedPages(CpuBackend(), 4 * PINNED_CHUNK_BYTES)
    before = pages.take(PINNED_CHUNK_BYTES)
    assert before is not None
    monkeypatch.setattr(CpuBackend, "allocate_host", refuse)
    assert pages.take(2 * PINNED_CHUNK_BYTES) is None and pages.take(1) is None and len(asked) == 1
    pages.give_back(before)
    assert pages.take(PINNED_CHUNK_BYTES) is not None, "what is pinned already is used on"


def test_nothing_is_held_after_the_end() -> None:
    pages = PinnedPages(CpuBackend(), PINNED_CHUNK_BYTES)
    page = pages.take(3000)
    assert page is not None
    pages.give_back(page)
    pages.release()
    assert pages.take(3000) is None
