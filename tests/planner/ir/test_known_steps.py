"""What is known of steps: numbers by batch, shapes by their rows."""

import pytest

from port_planner.ir.known_steps import KnownShape, KnownSteps


def test_numbers_are_those_of_the_batch_and_shapes_those_of_the_rows() -> None:
    full, short = KnownShape(0, 4, (), "a"), KnownShape(0, 2, (), "b")
    known = KnownSteps(2, (full, short), ((0.5,), (1.0,)))
    assert [known.numbers_of(batch) for batch in range(2)] == [(0.5,), (1.0,)]
    assert (known.of(0, 2), known.of(0, 3), known.of(1, 4)) == (short, None, None)
    with pytest.raises(IndexError):
        known.numbers_of(2)


def test_steps_without_numbers_have_none_in_any_batch() -> None:
    assert KnownSteps(2, ()).numbers_of(9) == ()
