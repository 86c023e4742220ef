"""Check that later steps, which no comparison reaches, run the same operators.

A script may branch on Python values in a place that the recorder does not search. So further updates of its loss run on tensors without
contents: forward, backward and the hooks after the optimizer's step. The arguments of each operator are compared with those of the first
such step on a batch with the same number of rows. Neither weights nor optimizer state change.

Where the script reads a whole number or a truth value of a tensor, it gets the recorded one: the bundle compares it in each step.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from port_agent.training.comparison import tensor_checksum
from port_planner.base.errors import CaptureError, PortError, program_line
from port_planner.column_file import Column
from port_planner.ir.bundle.data_order import bucket_batches
from port_planner.ir.bundle.manifest import BucketSize
from port_planner.ir.known_steps import KnownRead
from port_planner.ir.spelled_schedule import NO_SCHEDULE, SpelledSchedule
from port_planner.job import TrainingJob
from port_planner.job_device import kind_of_job, on_device
from port_planner.kept_parts import KeptParts
from port_planner.plain_steps import model_state, plain_pass
from port_planner.schedules import difference, step_watched
from port_planner.torch_compat.autograd import LinesOfNodes
from port_planner.torch_compat.contentless import has_contents, without_contents
from port_planner.torch_compat.modes import OperatorMode, pytree, without_modes
from port_planner.torch_compat.optimizers import hooks_after_steps, note_step

_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Exceptions that code may raise if it asks a tensor without contents for them."""

Call = tuple[Any, ...]
"""An operator and its arguments, with tensors by shape, layout and place."""


@dataclass(frozen=True, slots=True)
class _Known:
    """The calls of a step, and the line of each."""

    calls: Sequence[Call]
    lines: Sequence[str]
    had_given_buffers: bool = False
    """Whether it ran with the buffers that were given, and left others in their place, which may lie otherwise in memory."""

    def has(self, number: int, call: Call) -> bool:
        """Return whether the call of this number is `call`, as far as this step shows it."""
        if number >= len(self.calls):
            return False
        known = self.calls[number]
        return known == call or (self.had_given_buffers and _without_tensors(known) == _without_tensors(call))


class ChangedStepError(PortError):
    """A later step runs different operators, or with different arguments."""


def unchanged_updates(
    job: TrainingJob,
    columns: Sequence[Sequence[Column]],
    first: int,
    last: int,
    within_s: float,
    schedule: SpelledSchedule = NO_SCHEDULE,
    reads: Sequence[KnownRead] = (),
) -> int:
    """Return how many updates, from the one after `first` to at most `last`, run the operators of the first of them.

    `columns`: columns of each bucket. `schedule`: expected values of its scheduler. `reads`: what its steps read in Python, in order. As many
    updates run as `within_s` CPU seconds allow, and none if the script looks at other contents. Raises ChangedStepError for the first that differs. Afterwards the job must not be used.
    """
    sizes = [
        BucketSize(c[0].shape[0], size)
        for c, size in zip(columns, (job.batch_size, *(b.batch_size for b in job.buckets)), strict=True)
    ]
    start, began, parts = first * job.accumulate, time.process_time(), KeptParts(job, columns)
    batches = bucket_batches(job.seed, sizes, drop_last=[job.drop_last] * len(sizes), start=start)
    known: dict[tuple[int, int], _Known] = {}
    known_hooks: list[_Known] = []
    updates = 0
    note_step(job.optimizer)  # its schedule warns because it never made a real update
    for number, (_, bucket, rows) in zip(range(start, last * job.accumulate), batches, strict=False):
        batch = on_device((c[: len(rows)].clone() for c in columns[bucket]), kind_of_job(job))
        ends_update = (number + 1) % job.accumulate == 0
        try:
            calls = _Calls(job, batch, known.get((bucket, len(rows))))
            calls.reads = [(r.line, r.value) for r in reads if (r.bucket, r.rows) == (bucket, len(rows))]
            with parts.kept(replaces_buffers=not known), without_contents(), calls:
                plain_pass(job, batch, number, bucket)
            replaced = calls.leave_buffers()
            known[bucket, len(rows)] = replace(calls.finished(), had_given_buffers=replaced and not known)
            if ends_update:
                calls = _Calls(job, (), known_hooks[0] if known_hooks else None)
                with parts.kept(), without_contents(), calls:
                    for hook in hooks_after_steps(job.optimizer):
                        hook(job.optimizer, (), {})
                known_hooks[:] = [calls.finished()]
                if job.scheduler is not None:
                    step_watched(job)
        except (CaptureError, ChangedStepError) as error:
            raise ChangedStepError(f"update {number // job.accumulate + 1}: {error}") from None
        except _ERRORS:
            return updates
        job.model.zero_grad(set_to_none=True)
        if ends_update:
            updates += 1
            if other := difference(schedule, job.optimizer, first + updates):
                raise ChangedStepError(f"update {first + updates + 1}: {other}")
            if time.process_time() - began > within_s:
                break
    try:
        parts.require_contents()
    except CaptureError as error:
        raise ChangedStepError(f"in one of updates {first + 1} to {first + updates}: {error}") from None
    return updates


class _Calls(OperatorMode):
    """Records each operator's arguments, and compares them with the `expected` ones."""

    def __init__(self, job: TrainingJob, batch: Sequence[torch.Tensor], expected: _Known | None) -> None:
        initialise: Any = super().__init__
        initialise()
        self._calls: list[Call] = []
        self._lines: list[str] = []
        self._nodes = LinesOfNodes(program_line)
        self.reads: list[tuple[str, bool | int]] = []
        """The lines and values of the reads that are still to come."""
        self._model = job.model
        self._expected = expected
        self._places: dict[int, tuple[int, StorageWeakRef]] = {}
        """The number of each storage in the order of first use; the reference prevents reuse of its address."""
        self._given = {StorageWeakRef(t.untyped_storage()).cdata for t in (*batch, *(t for _, t in model_state(job)))}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._nodes.note()
        if (
            func.namespace == "prim"
        ):  # asks for a device or a layout, which torch does of tensors without contents alone
            return func(*args, **(kwargs or {}))
        parts, form = pytree.tree_flatten((args, kwargs or {}))
        call = (str(func), str(form), *map(self._described, parts))
        self._note(call)
        if func is torch.ops.aten._local_scalar_dense.default and not has_contents(args[0]):
            return self._read(func, args)
        made = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(made):
            self._described(tensor)
        return made

    def _read(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Return the value of the next read that is known for this line. Raises what torch does if there is none."""
        line = self._nodes.line()
        at = next((i for i, (place, _) in enumerate(self.reads) if place == line), None)
        return func(*args) if at is None else self.reads.pop(at)[1]

    def leave_buffers(self) -> bool:
        """Record which results replace buffers, and return whether any does. Raises ChangedStepError if others are expected."""
        made = [item for item in self._model.named_buffers() if not has_contents(item[1])]
        self._note(("the model's buffers", "", *((name, *self._described(buffer)) for name, buffer in made)))
        return bool(made)

    def _note(self, call: Call) -> None:
        number, line = len(self._calls), self._nodes.line()
        self._calls.append(call)
        self._lines.append(line)
        if self._expected is not None and not self._expected.has(number, call):
            raise ChangedStepError(_difference(self._expected.calls[number : number + 1], call, line))

    def finished(self) -> _Known:
        """Return the recorded calls. Raises ChangedStepError if there are fewer than expected."""
        number = len(self._calls)
        if self._expected is not None and number < len(self._expected.calls):
            line = self._expected.lines[number]
            raise ChangedStepError(f"{line}{': ' * bool(line)}{self._expected.calls[number][0]} no longer runs")
        return _Known(self._calls, self._lines)

    def _described(self, part: Any) -> Any:
        if isinstance(part, torch.ScriptObject):
            return type(part).__name__  # its text is its address, as of the ranges that a profiler marks
        if not isinstance(part, torch.Tensor):
            return repr(part)
        reference = StorageWeakRef(part.untyped_storage())
        place, _ = self._places.setdefault(reference.cdata, (len(self._places), reference))
        contents = ""
        if has_contents(part) and reference.cdata not in self._given:
            with without_modes():
                contents = tensor_checksum(part.detach().contiguous())
        return part.dtype, tuple(part.shape), part.stride(), part.storage_offset(), place, contents


def _without_tensors(call: Call) -> Call:
    return tuple(part for part in call if isinstance(part, str))


def _difference(expected: Sequence[Call], call: Call, place: str) -> str:
    """Describe a call in line `place` that earlier steps did not make."""
    line, name = f"{place}{': ' * bool(place)}", call[0]
    if not expected or expected[0][0] != name:
        return f"{line}{name} runs{f' instead of {expected[0][0]}' if expected else ' in addition'}"
    changed = next(((was, now) for was, now in itertools.zip_longest(expected[0][2:], call[2:]) if was != now), None)
    if changed is None or not all(isinstance(part, str) for part in changed):
        return f"{line}{name} takes other tensors"
    return f"{line}{name} is called with {changed[1]} instead of {changed[0]}"
