"""Persistent overflows are distinguished from those of occasional batches."""

from port_agent.training.packing_drift import OFTEN, SPARSE_STEPS, WATCHED_STEPS, PackingDrift
from port_agent.training.step_packing import Overflow
from tests.agent.training.made_graph import COUNT, graph

T, NBYTES = 2, 4 * COUNT


def test_a_tensor_that_overflows_step_after_step_gets_its_largest_size_and_a_margin() -> None:
    drift = PackingDrift(graph(), {(T, 1): NBYTES})
    for k in range(OFTEN):
        assert drift.take() == {}
        drift.note([Overflow(T, 1, NBYTES // 2 + k)], {})
    (wanted,) = drift.take().values()
    assert wanted is not None and 1.05 < wanted / (NBYTES // 2) < 1.15
    assert drift.take() == {}, "it looks anew"


def test_a_batch_now_and_then_may_spill() -> None:
    drift = PackingDrift(graph(), {(T, 1): NBYTES})
    for k in range(4 * WATCHED_STEPS):
        drift.note([Overflow(T, 1, NBYTES // 2)] if k % 2 else [], {})
        assert drift.take() == {}


def test_what_saves_too_little_or_cannot_be_packed_is_not_packed_any_more() -> None:
    for needed in (NBYTES, None):
        drift = PackingDrift(graph(), {(T, 1): NBYTES})
        for _ in range(OFTEN):
            drift.note([Overflow(T, 1, needed)], {})
        assert drift.take() == {(T, 1): None}


def test_room_that_stays_unused_for_long_is_named_once_with_the_largest_size_and_a_margin() -> None:
    drift = PackingDrift(graph(), {(T, 1): NBYTES})
    for k in range(SPARSE_STEPS):
        assert drift.take_sparser() == {}
        drift.note([], {(T, 1): NBYTES // 2 + k})
    (wanted,) = drift.take_sparser().values()
    assert wanted is not None and 1.05 < wanted / (NBYTES // 2) < 1.15
    for _ in range(2 * SPARSE_STEPS):
        drift.note([], {(T, 1): NBYTES // 2})
        assert drift.take_sparser() == {}, "not much less than what it named"


def test_one_dense_batch_in_a_while_keeps_the_room() -> None:
    drift = PackingDrift(graph(), {(T, 1): NBYTES})
    for k in range(4 * SPARSE_STEPS):
        if k % (SPARSE_STEPS - 1):
            drift.note([], {(T, 1): NBYTES // 2})
        else:
            drift.note([Overflow(T, 1, NBYTES)], {}) if k % 2 else drift.note([], {(T, 1): NBYTES - 1})
        assert drift.take_sparser() == {} and drift.take() == {}
