"""What is known about the steps of a job whose program counts: the number of updates for which they are the
same, except for numbers.

It does not load torch, because the manifest contains a part of it.
"""

from dataclasses import dataclass

from port_planner.base.bounds import Count


@dataclass(frozen=True, slots=True)
class NumberPlace:
    """A number among an operator's arguments that changes from batch to batch.

    `op`: the operator's index on the tape; `argument`: its position, or its keyword; `slot`: the index of the number
    among those of the batch.
    """

    op: Count
    argument: int | str
    slot: Count


@dataclass(frozen=True, slots=True)
class KnownShape:
    """The step on batches of that many `rows` of a bucket; `digest`: of its calls, without the numbers
    at `places`."""

    bucket: Count
    rows: Count
    places: tuple[NumberPlace, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class KnownRead:
    """A whole number or truth value that each step reads from a tensor in Python; `line`: where. A bundle compares it in each step.

    The step is that on batches of `rows` rows of a bucket.
    """

    bucket: Count
    rows: Count
    line: str
    value: bool | int


@dataclass(frozen=True, slots=True)
class KnownSteps:
    """The steps of a job's first `updates`, which its program ran alone from the beginning.

    `numbers`: numbers of each batch, in the slots of its shape; none if no shape has any.
    """

    updates: Count
    shapes: tuple[KnownShape, ...]
    numbers: tuple[tuple[float, ...], ...] = ()

    def numbers_of(self, batch: int) -> tuple[float, ...]:
        """Return the numbers of a batch, counted from 0 over all updates. Raises IndexError beyond the last one."""
        return self.numbers[batch] if self.numbers else ()

    def of(self, bucket: int, rows: int) -> KnownShape | None:
        """Return what is known about the step on batches of that many rows of a bucket; None for
        a shape that never occurs.
        """
        return next((shape for shape in self.shapes if (shape.bucket, shape.rows) == (bucket, rows)), None)
