"""The steps that a program will make, found by running it on tensors without contents, for as long as it will train.

A program that counts, or keeps tensors over steps, may decide something by them in a later step, or compute with another
number each time. That it decides nothing, and the numbers, are seen where every step is recorded: forward and backward
pass, and the hooks after updates. Neither weights nor the optimizer change meanwhile; what reads contents cannot be followed.
"""

import math
import time
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import islice

from port_planner.base.errors import CaptureError, line_of_error
from port_planner.capture.cross_step_state import StepResults
from port_planner.capture.numbers import Place, digest, digest_of_calls, numbers_of, without_numbers
from port_planner.capture.recorder import Tape
from port_planner.capture.rerecord_check import first_difference
from port_planner.capture.step import record_hooks_without_contents, record_without_contents
from port_planner.ir.bundle.data_order import bucket_batches
from port_planner.ir.known_steps import KnownShape, KnownSteps, NumberPlace
from port_planner.ir.spelled_schedule import NO_SCHEDULE, SpelledSchedule
from port_planner.job import TrainingJob
from port_planner.job_checks import checked_samples
from port_planner.job_device import kind_of_job, on_device
from port_planner.kept_parts import KeptParts
from port_planner.schedules import difference, step_watched
from port_planner.torch_compat.optimizers import note_step

_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Exceptions that code may raise when it needs a tensor's contents."""


@dataclass(slots=True)
class _Shape:
    """The steps of one shape: the first step, the places of its numbers, and the numbers that changed since."""

    tape: Tape
    digest: str
    first: dict[Place, float]
    changed: set[Place] = field(default_factory=set)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its operators."""
        return tuple(op.name for op in self.tape.ops)


def known_steps(job: TrainingJob, updates: int, within_s: float, schedule: SpelledSchedule = NO_SCHEDULE) -> KnownSteps:
    """Return the steps of a job that has just been made, of that many updates. The job is not to be used afterwards.

    `schedule`: expected values of its scheduler.

    Raises CaptureError if a step differs from the first of its shape by more than numbers, or if the program depends on
    contents. Also raises it if they take more than `within_s` seconds of the processor.
    """
    followed, began = _StepsAhead(job), time.process_time()
    note_step(job.optimizer)  # its schedule warns because it never made a real update
    for number in range(updates):
        try:
            followed.update()
        except _ERRORS as error:
            what, line = str(error).strip().partition("\n")[0], line_of_error(error)
            raise CaptureError(
                f"update {number + 1} cannot be followed without contents ({line}{': ' * bool(line)}{type(error).__name__}: {what})"
            ) from error
        except CaptureError as error:
            raise CaptureError(f"update {number + 1}: {error}") from error
        if other := difference(schedule, job.optimizer, number + 1):
            raise CaptureError(f"update {number + 2}: {other}")
        if time.process_time() - began > within_s and number + 1 < updates:
            raise CaptureError(
                f"{number + 1} of {updates} updates could be followed in {within_s:.0f} s; plan it for fewer --epochs"
            )
    followed.kept.require_contents()
    return followed.known()


class _StepsAhead:
    """The steps so far of a job whose tensors have no contents."""

    def __init__(self, job: TrainingJob) -> None:
        self._job, self._kind = job, kind_of_job(job)
        buckets = checked_samples(job)
        self._columns = [samples.columns for samples in buckets]
        self.kept = KeptParts(job, self._columns)
        sizes = [samples.size for samples in buckets]
        self._batches = bucket_batches(job.seed, sizes, drop_last=[job.drop_last] * len(sizes))
        self._results = StepResults()
        self._shapes: dict[tuple[int, int], _Shape] = {}
        self._steps: list[tuple[tuple[int, int], dict[Place, float]]] = []
        self._hooks: Tape | None = None
        self._updates = 0

    def update(self) -> None:
        """Run the batches of an update. Raises CaptureError if one differs by more than numbers."""
        job = self._job
        for _, bucket, rows in islice(self._batches, job.accumulate):
            batch = on_device((column[: len(rows)].clone() for column in self._columns[bucket]), self._kind)
            with self.kept.kept(replaces_buffers=not self._shapes):
                tape = record_without_contents(job.model, job.loss_of(bucket), batch, self._results)
            self._add((bucket, len(rows)), tape)
            job.model.zero_grad(set_to_none=True)
            self._results.forget_expired()
        with self.kept.kept():
            tape = record_hooks_without_contents(job.model, job.optimizer, self._results)
        self._hooks = self._hooks or tape
        if digest(tape, frozenset()) != digest(self._hooks, frozenset()):
            difference = first_difference(self._hooks, tape)
            raise CaptureError(
                f"the hooks after the optimizer's step do something else than in the first update: {difference}"
            )
        if job.scheduler is not None:
            step_watched(job)
        self._updates += 1

    def _add(self, shape: tuple[int, int], tape: Tape) -> None:
        numbers = numbers_of(tape)
        spelled = digest(tape, numbers.keys())
        known = self._shapes.setdefault(shape, _Shape(tape, spelled, numbers))
        if known.digest != spelled:
            difference = first_difference(without_numbers(known.tape), without_numbers(tape))
            raise CaptureError(f"the step differs from the first of its shape: {difference}")
        changed = {place for place, number in numbers.items() if repr(number) != repr(known.first[place])}
        if strange := [place for place in sorted(changed, key=repr) if not math.isfinite(numbers[place])]:
            op = tape.ops[strange[0][0]]
            raise CaptureError(
                f"{op.line}{': ' * bool(op.line)}a number that changes from step to step is not finite "
                f"({numbers[strange[0]]} for {op.name})"
            )
        known.changed |= changed
        self._steps.append((shape, numbers if changed else known.first))

    def known(self) -> KnownSteps:
        """Return what the steps so far show."""
        changed = defaultdict[tuple[str, ...], set[Place]](set)
        for shape in self._shapes.values():  # of a shape that comes once, others show which numbers change
            changed[shape.names] |= shape.changed
        shapes, slots = list[KnownShape](), dict[tuple[int, int], list[Place]]()
        for (bucket, rows), shape in self._shapes.items():
            columns: dict[tuple[str, ...], int] = {}
            places, read = list[NumberPlace](), list[Place]()
            changing = changed[shape.names] & shape.first.keys()
            for op, argument in sorted(changing, key=repr):
                column = tuple(repr(n[op, argument]) for of, n in self._steps if of == (bucket, rows))
                slot = columns.setdefault(column, len(columns))
                read += [(op, argument)] * (slot == len(read))
                places.append(NumberPlace(op, argument, slot))
            slots[bucket, rows] = read
            shapes.append(KnownShape(bucket, rows, tuple(places), digest_of_calls(shape.tape, changing)))
        numbers = tuple(tuple(found[place] for place in slots[shape]) for shape, found in self._steps)
        return KnownSteps(self._updates, tuple(shapes), numbers if any(slots.values()) else ())
