"""The bytes of each stage are those that the replay counts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from port_planner.problem.problem import Schedule, Semantics
from port_planner.problem.replay import replay
from port_planner.search.greedy.load import StageLoad, step_slices
from tests.planner.brute_force import random_problem
from tests.planner.search.greedy.chains import chain


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(Semantics))
def test_with_everything_kept_it_is_what_the_replay_counts(seed: int, semantics: Semantics) -> None:
    problem = random_problem(seed, semantics=semantics)
    assert np.array_equal(StageLoad(problem).peaks(), replay(problem, Schedule()).load_bytes)


def test_short_is_what_goes_over_the_limit() -> None:
    peaks = StageLoad(chain()).peaks()
    assert peaks.tolist() == [90, 110, 150, 150, 110, 90]
    assert StageLoad(chain(ram_bytes=120)).shortage().over.tolist() == [0, 0, 30, 30, 0, 0]
    assert not StageLoad(chain(ram_bytes=None)).shortage(1.0).over.any()


def test_bytes_count_more_where_most_are_missing() -> None:
    load = StageLoad(chain(ram_bytes=100))
    plain, weighed = load.shortage(), load.shortage(emphasis=1.0)
    assert plain.over.tolist() == [0, 10, 50, 50, 10, 0]
    assert (plain.covered(slice(1, 3), 20), plain.covered([1, 4], 5)) == (30, 10)
    assert weighed.covered(slice(1, 3), 20) == pytest.approx(10 * 0.2 + 20)
    assert weighed.touches([slice(0, 2)]) and not weighed.touches([slice(0, 1), slice(5, 6)])


@pytest.mark.parametrize(
    ("start", "stop", "stages"), [(1, 4, [1, 2, 3]), (4, 8, [4, 5, 0, 1]), (6, 8, [0, 1]), (3, 3, []), (5, 6, [5])]
)
def test_stages_beyond_the_end_are_those_of_the_next_step(start: int, stop: int, stages: list[int]) -> None:
    found = step_slices(start, stop, size=6)
    assert [s for part in found for s in range(part.start, part.stop)] == stages


def test_a_stage_over_the_limit_may_take_as_much_as_it_has_and_no_more() -> None:
    load = StageLoad(chain(ram_bytes=100))
    assert load.allows(0, 20) and not load.allows(0, 21)  # 80 B before the input is born
    assert load.allows(2, 40) and not load.allows(2, 41)  # 150 with the output that is born there, 110 before
