"""Pages in the host's memory: one place for each storage, no two that are away together in the same bytes."""

from hypothesis import given
from hypothesis import strategies as st

from port_planner.ir.graph import Op, Phase, Role, StepGraph, Storage
from port_planner.ir.lowering.host_pages import ALIGNMENT, HostMemoryError, place_host_pages
from port_planner.ir.lowering.placement import HostPages, Position

Trip = tuple[int, int, int]
"""Bytes, the op after which a storage leaves, and the one before which it is back."""


def graph(sizes: list[int]) -> StepGraph:
    storages = tuple(Storage(nbytes, Role.TEMPORARY, f"t{s}", "cuda") for s, nbytes in enumerate(sizes))
    return StepGraph(storages, (), (Op("aten::add", (), (), (), (), Phase.FORWARD),), (), 0)


def positions(trips: list[Trip], count: int) -> list[Position]:
    at = [Position() for _ in range(count)]
    for s, (_, leaves, back) in enumerate(trips):
        at[leaves].writes.append(s)
        at[leaves].targets[s] = 1
        at[back].returns.append(s)
    return at


TRIPS = st.lists(
    st.tuples(st.integers(1, 5000), st.integers(0, 18), st.integers(1, 6)).map(
        lambda t: (t[0], t[1], min(t[1] + t[2], 19))
    ),
    max_size=12,
)


@given(TRIPS)
def test_pages_that_are_away_together_never_overlap(trips: list[Trip]) -> None:
    made = graph([nbytes for nbytes, _, _ in trips])
    pages = place_host_pages(made, positions(trips, 20), {}, {1: None})
    places = dict(pages.places)
    assert set(places) == set(range(len(trips)))
    for s, (nbytes, leaves, back) in enumerate(trips):
        assert places[s] % ALIGNMENT == 0 and places[s] + nbytes <= pages.nbytes
        for other, (size, goes, returns) in enumerate(trips[:s]):
            together = leaves < returns and goes < back
            assert not together or places[s] + nbytes <= places[other] or places[other] + size <= places[s]


def test_what_comes_back_before_another_leaves_gives_its_place_to_it() -> None:
    trips = [(1024, 0, 3), (1024, 3, 6), (512, 1, 2)]
    pages = place_host_pages(graph([n for n, _, _ in trips]), positions(trips, 8), {}, {1: 2048})
    assert pages == HostPages(((0, 0), (1, 0), (2, 1024)), 1536)


def test_pages_of_media_have_no_place_here() -> None:
    assert place_host_pages(graph([100]), positions([(100, 0, 1)], 2), {}, {2: 10}) == HostPages()


def test_what_is_persistent_has_a_copy_of_its_own_beside_the_block() -> None:
    trips = [(1024, 0, 3), (5000, 3, 6)]
    homes, at = {1: 1, 2: 0}, positions(trips, 8)
    pages = place_host_pages(graph([1024, 5000, 7]), at, homes, {1: 1024 + 8192})
    assert pages == HostPages(((0, 0),), 1024, frozenset({1}))
    try:
        place_host_pages(graph([1024, 5000, 7]), at, homes, {1: 1024 + 8191})
    except HostMemoryError as error:
        assert error.needed_bytes == 1024 + 8192
    else:
        raise AssertionError("it was laid out all the same")


def test_too_little_memory_is_said_with_both_numbers() -> None:
    try:
        place_host_pages(graph([1 << 20]), positions([(1 << 20, 0, 1)], 2), {}, {1: 1 << 19})
    except HostMemoryError as error:
        assert (error.needed_bytes, error.limit_bytes) == (1 << 20, 1 << 19)
        assert "1.0 MiB of the host's memory, 0.5 MiB are available" in str(error)
    else:
        raise AssertionError("it was laid out all the same")
