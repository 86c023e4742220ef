"""The first updates of a bundle's script, run alone, with which the bundle is compared."""

import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from port_agent.guard import guard_environment
from port_agent.prepare.referee.process import Follow, RefereeResults, RunAhead
from port_agent.system.helper_process import HelperCommand, HelperError, run_helper
from port_agent.system.python_process import module_environment, threads_environment
from port_agent.training.comparison import processor, tensor_checksum
from port_planner.base.errors import CaptureError
from port_planner.base.process_memory import available_bytes
from port_planner.base.units import format_bytes
from port_planner.ir.allowed_operators import GUARD
from port_planner.ir.bundle.manifest import BucketSize, ExpectedResults, PlainRun, graph_name
from port_planner.ir.known_steps import KnownRead, KnownSteps
from port_planner.ir.spelled_schedule import SpelledSchedule
from port_planner.job import TrainingJob
from port_planner.job_device import kind_of_job
from port_planner.make_bundle import CapturedJob
from port_planner.plain_steps import model_state
from port_planner.schedules import spelled

_MIN_UPDATES, _MAX_UPDATES = 4, 24
"""Fewest and most updates.

The fewest include the end of an epoch of their samples. The most are made if they are quick, or
until the schedule changes.
"""
_WITHIN_S = 2.0
"""Seconds for updates beyond the fewest."""
_UNCHANGED_WITHIN_S = 5.0
"""CPU seconds for further updates on tensors without contents, as many as `_followed_updates`."""
_AHEAD_WITHIN_S = 60.0
"""CPU seconds for all updates of a program that counts its steps, on tensors without contents."""
_PATIENCE_S = 600.0
"""Seconds of the whole run, including the script's own start."""
_MIN_FOLLOWED = 100
"""Fewest of these, if time allows and the bundle may train for longer than was planned."""
_MAX_NAMED = 3


@dataclass(frozen=True, slots=True)
class Script:
    """A script, and the purpose of its bundle.

    `peak_bytes`: peak of its step without planning; `updates`: number to be trained.
    """

    path: Path
    page_dir: Path
    ram_bytes: int
    threads: int
    peak_bytes: int
    updates: int = 0


def run_alone(captured: CapturedJob, script: Script) -> PlainRun:
    """Run the script in a separate process and return its results, or why it could not run.

    Raises CaptureError if it changes a tensor of the model that the recorded step does not change, or if a later
    step runs other operators.
    """
    own = _other_by_design(captured)
    if own:
        return PlainRun(unchecked=own)
    guarded = guard_environment(script.page_dir.absolute(), tensor_bytes=None, process_bytes=script.ram_bytes)
    free_bytes = available_bytes()
    if not guarded and script.peak_bytes > free_bytes:
        needed = format_bytes(script.peak_bytes)
        return PlainRun(unchecked=f"the script alone takes {needed}, but this machine has {format_bytes(free_bytes)}")
    rows = tuple(_rows(captured.job, size, len(captured.job.buckets) + 1) for size in _sizes(captured))
    try:
        found = _followed(captured, script, rows, guarded)
    except HelperError as error:
        return PlainRun(unchecked=f"the script alone {error}")
    return _checked(captured, found, rows)


def run_ahead(
    script: Path, page_dir: Path, device: str, threads: int, updates: int, schedule: SpelledSchedule
) -> KnownSteps:
    """Return the steps of that many updates of a script, run in a separate process on tensors without contents.

    `schedule`: expected values of its scheduler. Raises CaptureError, with the reason, if the steps are not known.
    """
    with tempfile.TemporaryDirectory(dir=page_dir, prefix=".port-ahead-") as folder:
        target = Path(folder).absolute() / "ahead"
        request = RunAhead(
            str(script),
            folder,
            str(target),
            device,
            threads,
            not sys.flags.safe_path,
            updates,
            _AHEAD_WITHIN_S,
            schedule,
        )
        try:
            _run(msgspec.json.encode(request), threads, {})
        except HelperError as error:
            raise CaptureError(f"the script alone {error}") from error
        found = msgspec.msgpack.decode(target.read_bytes(), type=KnownSteps | str)
    if isinstance(found, str):
        raise CaptureError(found)
    return found


def _run(request: bytes, threads: int, guarded: Mapping[str, str]) -> None:
    environment = {**module_environment(), **threads_environment(threads), **guarded}
    command = HelperCommand("port_agent.prepare.referee.process", (), environment, directory=None)
    run_helper(command, request, within_s=_PATIENCE_S)


def _other_by_design(captured: CapturedJob) -> str:
    """Return why a bundle's numbers are expected to differ from its script's, or ""."""
    if captured.reordered:
        return "sums may be made in a different order"
    if captured.placed or captured.teams:
        return "its operators are divided, which no script does"
    if captured.job.pruning is not None:
        return "its weights are pruned, which no script does"
    return ""


def _sizes(captured: CapturedJob) -> list[BucketSize]:
    columns = (captured.data, *captured.buckets)
    sizes = (captured.job.batch_size, *(bucket.batch_size for bucket in captured.job.buckets))
    return [BucketSize(int(data[0].shape[0]), size) for data, size in zip(columns, sizes, strict=True)]


def _rows(job: TrainingJob, size: BucketSize, buckets: int) -> int:
    """Return how many samples of a bucket make a short epoch: full batches for two updates of all buckets
    together, and the short batch.
    """
    full, rest = divmod(size.samples, size.batch_size)
    kept = min(full, max(1, 2 * job.accumulate // buckets))
    return kept * size.batch_size + (0 if job.drop_last and kept else rest)


def _least_updates(captured: CapturedJob) -> int:
    """Return how many updates include the end of an epoch, and the schedule's first change if that is near."""
    rows = captured.schedule
    changed = next((update for update, row in enumerate(rows) if row != rows[0]), 0)
    return min(max(_MIN_UPDATES, min(changed + 1, _MAX_UPDATES)), _known_updates(captured))


def _known_updates(captured: CapturedJob) -> int:
    """Return the largest number of updates for which the bundle has the optimizer's numbers."""
    recorded = captured.optimizer.recorded
    known = [
        _MAX_UPDATES,
        *([] if captured.known is None else [captured.known.updates]),
        *([len(captured.schedule)] if captured.schedule else []),
    ]
    return min([*known, *([recorded.updates] if recorded is not None and recorded.updates is not None else [])])


def _followed_updates(captured: CapturedJob, trained: int) -> int:
    """Return for how many updates the operators are examined, of which `trained` are planned."""
    if captured.known is not None:
        return 0
    recorded = captured.optimizer.recorded
    limited = bool(captured.schedule) or (recorded is not None and recorded.updates is not None)
    return trained if limited else max(trained, _MIN_FOLLOWED)


def _followed(
    captured: CapturedJob, script: Script, rows: tuple[int, ...], guarded: Mapping[str, str]
) -> RefereeResults:
    """Run the script. Raises HelperError if it ends in an unexpected way."""
    with tempfile.TemporaryDirectory(dir=script.page_dir, prefix=".port-alone-") as folder:
        target = Path(folder).absolute() / "followed"
        request = Follow(
            script=str(script.path),
            folder=folder,
            target=str(target),
            device=kind_of_job(captured.job),
            threads=script.threads,
            rows=rows,
            finds_beside=not sys.flags.safe_path,
            least_updates=_least_updates(captured),
            most_updates=_known_updates(captured),
            within_s=_WITHIN_S,
            ram_bytes=script.ram_bytes,
            trained_updates=_followed_updates(captured, script.updates),
            unchanged_within_s=_UNCHANGED_WITHIN_S,
            schedule=spelled(captured.job.optimizer, captured.schedule),
            reads=tuple(recorded_reads(captured)),
        )
        _run(msgspec.json.encode(request), script.threads, guarded)
        return msgspec.msgpack.decode(target.read_bytes(), type=RefereeResults)


def recorded_reads(captured: CapturedJob) -> Iterator[KnownRead]:
    """Yield what the recorded steps read in Python and a bundle compares, in order."""
    kind = "step" if captured.job.accumulate == 1 else "first"
    for bucket, size in enumerate(_sizes(captured)):
        for rows in {size.batch_size, size.samples % size.batch_size}:
            graph = captured.graphs.get(graph_name(kind, rows, size, bucket))
            for op in graph.ops if graph is not None else ():
                if op.name == GUARD and isinstance(op.args[1], bool | int) and isinstance(op.args[2], str):
                    yield KnownRead(bucket, rows, op.args[2], op.args[1])


def _checked(captured: CapturedJob, found: RefereeResults, rows: tuple[int, ...]) -> PlainRun:
    """Return the run if it began with the bundle's initial state. Raises CaptureError as `run_alone` does."""
    job, recorded = captured.job, captured.layouts
    began = {key: tensor_checksum(tensor) for key, tensor in model_state(job)}
    if other := sorted(key for key in began if found.began.get(key) != began[key]):
        shown = _named(other)
        return PlainRun(
            unchecked=f"the script initializes {shown} differently each time it runs; seed its random numbers "
            "(torch.manual_seed)"
        )
    changed = [
        key for key, checksum in found.ended.items() if key not in recorded and began.get(key, checksum) != checksum
    ]
    if changed:
        raise CaptureError(
            f"the script changes {_named(changed)}, run alone, but the recorded step does not; train with "
            "`port-agent exec`, which runs the program itself"
        )
    if found.changed:
        raise CaptureError(
            f"{found.changed}, where a bundle would repeat the updates before it; let that depend on the batch and "
            "on torch's random numbers alone, by torch's operators; or train with `port-agent exec`, which handles "
            "such changes"
        )
    results = ExpectedResults(
        found.losses,
        captured.reference.threads,
        processor(kind_of_job(job)),
        {key: checksum for key, checksum in found.ended.items() if key in recorded},
        arithmetic=captured.reference.arithmetic,
    )
    updates = len(found.losses) // job.accumulate
    further = found.unchanged_updates if captured.known is None else captured.known.updates - updates
    return PlainRun(updates, rows, results, found.generators, "", further)


def _named(keys: list[str]) -> str:
    more = f" and {len(keys) - _MAX_NAMED} more" if len(keys) > _MAX_NAMED else ""
    return f"{', '.join(keys[:_MAX_NAMED])}{more}"
