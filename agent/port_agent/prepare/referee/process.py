"""The script run alone: `python -m port_agent.prepare.referee.process`, with one request on standard input.

This process has no recorder, no mode and no patched function. The job's own code runs, in an ordinary loop
(`port_planner.plain_steps`), until its numbers are recorded. Further updates then run without contents
(`unchanged_steps`). For a program that counts its steps, all updates run without contents. Under a budget its memory is
guarded, which no operator notices.
"""

import itertools
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from port_agent.guard import active_guard
from port_agent.system.helper_process import helper_exit_code
from port_agent.system.torch_loading import load_torch
from port_planner.ir.known_steps import KnownRead
from port_planner.ir.spelled_schedule import NO_SCHEDULE, SpelledSchedule

if TYPE_CHECKING:
    from port_planner.ir.known_steps import KnownSteps
    from port_planner.job import TrainingJob


class Follow(msgspec.Struct, frozen=True, tag=True):
    """Train what a script describes, and write the results to `target`.

    `folder`: directory for temporary columns of data. `finds_beside`: whether modules next to the script are found, as
    in plain Python. `rows`: first samples of each bucket to use. `least_updates`: at least this many, then until
    `within_s` seconds are over, and at most `most_updates`. `ram_bytes`: limit of resident memory, if it is guarded. Up
    to `trained_updates`, the operators of further updates are examined, for at most `unchanged_within_s` seconds of CPU
    time. `schedule`: expected values of its scheduler. `reads`: what its steps read in Python.
    """

    script: str
    folder: str
    target: str
    device: str
    threads: int
    rows: tuple[int, ...]
    finds_beside: bool
    least_updates: int
    most_updates: int
    within_s: float
    ram_bytes: int
    trained_updates: int = 0
    unchanged_within_s: float = 0.0
    schedule: SpelledSchedule = NO_SCHEDULE
    reads: tuple[KnownRead, ...] = ()


class RunAhead(msgspec.Struct, frozen=True, tag=True):
    """Run what a script describes for `updates` on tensors without contents, within `within_s` seconds of CPU time, and
    write its steps, as `KnownSteps`, to `target`; or why they are not known, as text.

    The other fields are those of `Follow`.
    """

    script: str
    folder: str
    target: str
    device: str
    threads: int
    finds_beside: bool
    updates: int
    within_s: float
    schedule: SpelledSchedule = NO_SCHEDULE


class RefereeResults(msgspec.Struct, frozen=True):
    """Results of a script's first updates, run alone: losses of its batches as hexadecimal floats, and XXH3-64 of the
    bytes of each tensor.

    `began`: hashes of parameters and buffers before the updates. `ended`: hashes of these and of the optimizer's state
    after them, by storage key. `generators`: digests of the states of torch's default generators after them, by kind of
    device. `unchanged_updates`: number of further updates that run the same operators; `changed`: difference of the
    next one, if there is one.
    """

    losses: tuple[str, ...]
    began: dict[str, str]
    ended: dict[str, str]
    generators: dict[str, str]
    unchanged_updates: int = 0
    changed: str = ""


def main() -> int:
    """Answer the one request, and return the exit code; errors go to standard error."""
    request: Follow | RunAhead = msgspec.json.decode(sys.stdin.buffer.read(), type=Follow | RunAhead)
    return helper_exit_code(lambda: _answer(request))


def _answer(request: Follow | RunAhead) -> None:
    guard = active_guard()
    if guard is not None and isinstance(request, Follow):
        guard.set_process_limit(request.ram_bytes)
    load_torch(meta_kernels=True)
    import torch

    from port_planner.ir.torch_device import repeat_kernels
    from port_planner.job_device import move
    from port_planner.job_sources import load_job
    from port_planner.script_loading import put_first

    script = Path(request.script)
    if request.finds_beside:
        put_first(str(script.resolve().parent))
    job = load_job(script, Path(request.folder))
    move(job, request.device)
    repeat_kernels(request.device)
    torch.set_num_threads(request.threads)
    found = followed(job, request) if isinstance(request, Follow) else _ahead(job, request)
    Path(request.target).write_bytes(msgspec.msgpack.encode(found))


def _ahead(job: "TrainingJob", request: RunAhead) -> "KnownSteps | str":
    """Return the steps of a job, or why they are not known."""
    from port_planner.base.errors import CaptureError
    from port_planner.steps_ahead import known_steps

    try:
        return known_steps(job, request.updates, request.within_s, request.schedule)
    except CaptureError as error:
        return str(error)


def followed(job: "TrainingJob", request: Follow) -> RefereeResults:
    """Train a job as requested and return the results; the job has then advanced."""
    from port_agent.prepare.referee.unchanged_steps import ChangedStepError, unchanged_updates
    from port_agent.training.comparison import generator_checksums, tensor_checksum
    from port_planner.job_checks import checked_samples
    from port_planner.plain_steps import dropped_optimizer_state, model_state, plain_losses
    from port_planner.schedules import difference

    buckets = checked_samples(job)
    data, *further_data = [
        [column[:count] for column in samples.columns] for samples, count in zip(buckets, request.rows, strict=True)
    ]
    began = {key: tensor_checksum(tensor) for key, tensor in model_state(job)}
    losses, since, other = list[str](), time.perf_counter(), ""
    for loss in plain_losses(job, data, request.most_updates * job.accumulate, buckets=further_data):
        losses.append(loss.hex())
        updates, rest = divmod(len(losses), job.accumulate)
        if not rest and (other := difference(request.schedule, job.optimizer, updates)):
            other = f"update {updates + 1}: {other}"
            break
        if not rest and updates >= request.least_updates and time.perf_counter() - since > request.within_s:
            break
    ended = {
        key: tensor_checksum(tensor) for key, tensor in itertools.chain(dropped_optimizer_state(job), model_state(job))
    }
    found = RefereeResults(tuple(losses), began, ended, generator_checksums(request.device), changed=other)
    if other:
        return found
    made, columns = len(losses) // job.accumulate, [samples.columns for samples in buckets]
    try:
        further = unchanged_updates(
            job, columns, made, request.trained_updates, request.unchanged_within_s, request.schedule, request.reads
        )
    except ChangedStepError as error:
        return msgspec.structs.replace(found, changed=str(error))
    return msgspec.structs.replace(found, unchanged_updates=further)


if __name__ == "__main__":
    sys.exit(main())
