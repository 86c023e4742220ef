"""Random sequences of requests against a model of the allocator that is ten lines of arithmetic.

The shared object is loaded, not preloaded: its functions are called by hand, and this process keeps its own malloc.
"""

import ctypes
import os
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from port_agent.malloc import preload_path
from port_agent.malloc.allocator import SMALLEST_BLOCK_BYTES, AllocatorStats

pytestmark = pytest.mark.skipif(preload_path() is None, reason="the allocator was not built (no glibc or no compiler)")

PAGE_BYTES = os.sysconf("SC_PAGESIZE") if hasattr(os, "sysconf") else 4096
NO_LIMIT = 2**64 - 1


class RawStats(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in AllocatorStats.__dataclass_fields__)


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(preload_path()))
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    for name, arguments, result in (
        ("malloc", [size], pointer),
        ("calloc", [size, size], pointer),
        ("realloc", [pointer, size], pointer),
        ("aligned_alloc", [size, size], pointer),
        ("free", [pointer], None),
        ("malloc_usable_size", [pointer], size),
        ("port_malloc_set_limit", [size], None),
        ("port_malloc_set_hard_limit", [size], None),
        ("port_malloc_trim", [size], size),
    ):
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, result
    return loaded


def charged(size: int) -> int:
    """Return what a request counts in `live_bytes`."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES if size >= SMALLEST_BLOCK_BYTES else 0


@dataclass
class Model:
    """What must be live, and the real allocator beside it."""

    library: ctypes.CDLL
    blocks: list[tuple[int, int, int]] = field(default_factory=list)  # address, size, mark
    limit: int = NO_LIMIT
    hard_limit: int = NO_LIMIT
    peak: int = 0
    marks: int = 0

    @property
    def live(self) -> int:
        return sum(charged(size) for _, size, _ in self.blocks)

    def stats(self) -> RawStats:
        raw = RawStats()
        self.library.port_malloc_stats(ctypes.byref(raw))
        return raw

    def accept(self, address: int | None, size: int, *, replaced: int = 0) -> bool:
        """Note a served request, or check that a refused one had to be; `replaced` bytes were live before it."""
        if not address:
            assert self.live + charged(size) > self.hard_limit
            return False
        assert charged(size) <= replaced or self.live + charged(size) <= self.hard_limit
        assert self.library.malloc_usable_size(address) >= size
        if charged(size):
            assert self.library.malloc_usable_size(address) == charged(size)
        for other, other_size, _ in self.blocks:
            assert address + size <= other or other + other_size <= address, "two live blocks overlap"
        self.marks = self.marks % 250 + 1
        ctypes.memset(address, self.marks, size)
        self.blocks.append((address, size, self.marks))
        self.peak = max(self.peak, self.live)
        return True

    def check_content(self, address: int, size: int, mark: int) -> None:
        assert ctypes.string_at(address, size) == bytes([mark]) * size

    def malloc(self, size: int) -> None:
        self.accept(self.library.malloc(size), size)

    def aligned(self, size: int, power: int) -> None:
        address = self.library.aligned_alloc(1 << power, size)
        if self.accept(address, size):
            assert address % (1 << power) == 0

    def calloc(self, size: int) -> None:
        address = self.library.calloc(size, 1)
        if address:
            assert ctypes.string_at(address, size) == bytes(size)
        self.accept(address, size)

    def free(self, index: int) -> None:
        if self.blocks:
            address, size, mark = self.blocks.pop(index % len(self.blocks))
            self.check_content(address, size, mark)
            self.library.free(address)

    def realloc(self, index: int, size: int) -> None:
        if not self.blocks:
            return
        address, old_size, mark = self.blocks.pop(index % len(self.blocks))
        moved = self.library.realloc(address, size)
        if moved:
            self.check_content(moved, min(size, old_size), mark)
            self.accept(moved, size, replaced=charged(old_size))
            return
        self.blocks.append((address, old_size, mark))
        self.check_content(address, old_size, mark)
        assert self.live + charged(size) > self.hard_limit

    def set_limit(self, limit: int) -> None:
        self.limit = limit
        self.library.port_malloc_set_limit(limit)

    def set_hard_limit(self, limit: int) -> None:
        self.hard_limit = limit
        self.library.port_malloc_set_hard_limit(limit)

    def trim(self, keep: int) -> None:
        before = self.stats().cached_bytes
        given_back = self.library.port_malloc_trim(keep)
        after = self.stats().cached_bytes
        assert before - given_back == after <= max(keep, 0)
        assert given_back == 0 or after > keep - PAGE_BYTES, "not more than needed"

    def reset_peak(self) -> None:
        self.library.port_malloc_reset_peak()
        self.peak = self.live

    def check(self) -> None:
        stats = self.stats()
        assert stats.live_bytes == self.live
        assert stats.live_blocks == sum(bool(charged(size)) for _, size, _ in self.blocks)
        assert stats.cached_bytes == 0 or stats.live_bytes + stats.cached_bytes <= self.limit
        assert (stats.cached_bytes == 0) == (stats.cached_blocks == 0)
        assert stats.peak_mapped_bytes >= max(stats.peak_live_bytes, stats.live_bytes + stats.cached_bytes)
        # A realloc that moves a block from or to glibc holds both for a moment; the model does not know which.
        assert stats.peak_live_bytes >= self.peak


SIZES = st.one_of(
    st.integers(1, 3 * PAGE_BYTES),
    st.sampled_from([SMALLEST_BLOCK_BYTES + d for d in (-1, 0, 1)]),
    st.integers(SMALLEST_BLOCK_BYTES, 600_000),
    st.sampled_from([100_000, 200_000, 400_000, 1_000_000]),
)
LIMITS = st.sampled_from([0, 100_000, 1_000_000, 1_500_001, 3_000_000, NO_LIMIT])
INDEXES = st.integers(0, 1000)
STEPS = st.one_of(
    st.tuples(st.just("malloc"), SIZES),
    st.tuples(st.just("malloc"), SIZES),
    st.tuples(st.just("free"), INDEXES),
    st.tuples(st.just("free"), INDEXES),
    st.tuples(st.just("calloc"), SIZES),
    st.tuples(st.just("realloc"), INDEXES, SIZES),
    st.tuples(st.just("aligned"), SIZES, st.integers(4, 21)),
    st.tuples(st.just("set_limit"), LIMITS),
    st.tuples(st.just("set_hard_limit"), LIMITS),
    st.tuples(st.just("trim"), st.integers(0, 2_000_000)),
    st.tuples(st.just("reset_peak")),
)


def replay(library: ctypes.CDLL, steps: list[tuple[str, int]]) -> None:
    model = Model(library)
    model.set_limit(NO_LIMIT)
    model.set_hard_limit(NO_LIMIT)
    model.reset_peak()
    try:
        for name, *arguments in steps:
            getattr(model, name)(*arguments)
            model.check()
    finally:
        for address, _, _ in model.blocks:
            library.free(address)
        library.port_malloc_trim(0)
    stats = model.stats()
    assert (stats.live_bytes, stats.cached_bytes, stats.live_blocks, stats.cached_blocks) == (0, 0, 0, 0)


@pytest.mark.slow
@given(st.lists(STEPS, max_size=60))
@settings(max_examples=150, deadline=None)
def test_random_sequences_match_the_model(library: ctypes.CDLL, steps: list[tuple[str, int]]) -> None:
    replay(library, steps)


@pytest.mark.long
@given(st.lists(STEPS, min_size=50, max_size=400))
@settings(max_examples=1500, deadline=None)
def test_many_random_sequences_match_the_model(library: ctypes.CDLL, steps: list[tuple[str, int]]) -> None:
    replay(library, steps)


@given(st.lists(st.tuples(st.booleans(), st.integers(SMALLEST_BLOCK_BYTES, 500_000), INDEXES), max_size=60))
@settings(max_examples=60, deadline=None)
def test_peak_is_exact_without_realloc(library: ctypes.CDLL, steps: list[tuple[bool, int, int]]) -> None:
    model = Model(library)
    model.set_limit(2_000_000)
    model.set_hard_limit(NO_LIMIT)
    model.reset_peak()
    try:
        for allocates, size, index in steps:
            model.malloc(size) if allocates else model.free(index)
            assert model.stats().peak_live_bytes == model.peak
    finally:
        for address, _, _ in model.blocks:
            library.free(address)


def test_a_repeated_step_needs_no_fresh_pages(library: ctypes.CDLL) -> None:
    sizes = [100_000, 300_000, 200_000, 700_000, 80_000, 300_000]
    library.port_malloc_set_hard_limit(NO_LIMIT)
    library.port_malloc_trim(0)
    library.port_malloc_set_limit(sum(map(charged, sizes)))
    fresh = []
    for _ in range(4):
        before = Model(library).stats()
        blocks = [library.malloc(size) for size in sizes]
        for address in blocks:
            library.free(address)
        fresh.append(Model(library).stats().maps - before.maps)
    library.port_malloc_trim(0)
    assert fresh[0] > 0
    assert fresh[1:] == [0, 0, 0]


def test_split_chunks_grow_together_again(library: ctypes.CDLL) -> None:
    library.port_malloc_set_hard_limit(NO_LIMIT)
    library.port_malloc_trim(0)
    library.port_malloc_set_limit(10 * SMALLEST_BLOCK_BYTES)
    whole = library.malloc(10 * SMALLEST_BLOCK_BYTES)
    library.free(whole)
    chunks = [library.malloc(3 * SMALLEST_BLOCK_BYTES) for _ in range(3)]
    stats = Model(library).stats()
    assert (stats.live_blocks, stats.cached_blocks, stats.cached_bytes) == (3, 1, SMALLEST_BLOCK_BYTES)
    for address in (chunks[1], chunks[0], chunks[2]):
        library.free(address)
    assert Model(library).stats().cached_blocks == 1
    assert library.malloc(10 * SMALLEST_BLOCK_BYTES) == whole
    library.free(whole)
    library.port_malloc_trim(0)


def test_pages_of_cached_blocks_are_put_together(library: ctypes.CDLL) -> None:
    unit = SMALLEST_BLOCK_BYTES
    library.port_malloc_set_hard_limit(NO_LIMIT)
    library.port_malloc_trim(0)
    library.port_malloc_set_limit(10 * unit)
    before = Model(library).stats()
    for address in [library.malloc(4 * unit), library.malloc(6 * unit)]:
        ctypes.memset(address, 1, 4 * unit)
        library.free(address)
    whole = library.malloc(8 * unit)
    after = Model(library).stats()
    assert after.assemblies - before.assemblies == 1
    assert after.moved_bytes - before.moved_bytes == 8 * unit
    assert after.evicted_bytes == before.evicted_bytes
    assert (after.live_bytes, after.cached_bytes) == (8 * unit, 2 * unit)
    ctypes.memset(whole, 2, 8 * unit)
    assert ctypes.string_at(whole, 8 * unit) == b"\2" * (8 * unit)
    library.free(whole)
    cleared = library.calloc(8 * unit, 1)
    assert cleared == whole and ctypes.string_at(whole, 8 * unit) == bytes(8 * unit)
    library.free(cleared)
    library.port_malloc_trim(0)


def test_growing_a_block_pushes_cached_ones_out(library: ctypes.CDLL) -> None:
    unit = SMALLEST_BLOCK_BYTES
    library.port_malloc_set_hard_limit(NO_LIMIT)
    library.port_malloc_trim(0)
    library.port_malloc_set_limit(10 * unit)
    library.port_malloc_reset_peak()
    grown, freed = library.malloc(2 * unit), library.malloc(8 * unit)
    library.free(freed)
    grown = library.realloc(grown, 7 * unit)
    stats = Model(library).stats()
    assert (stats.live_bytes, stats.cached_bytes) == (7 * unit, 3 * unit)
    assert stats.peak_mapped_bytes <= 10 * unit
    library.free(grown)
    library.port_malloc_trim(0)
