"""A fine-tuning in the foreground, run as by the agent: a job's file and its worker."""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from port_agent.finetuning.inputs.options import FinetuneOptions
from port_agent.finetuning.job_file import FinetuneJob
from port_agent.foreground.run import ForegroundRun, OnEvent, TrainReport, no_listener
from port_agent.worker.protocol import LeaveNow
from port_agent.worker.start import start_worker
from port_agent.worker.thread_limit import usable_cores
from port_agent.worker.worker_options import FINETUNE_WORKER, FinetuneWorkerOptions

_LEAVE_WITH_CHECKPOINT = LeaveNow(within_s=600.0)
"""Time that a worker gets for its last checkpoint: nobody kills it in the foreground, so a slow card may
take as long as it needs.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneRequest:
    """A model to fine-tune within a memory budget; a request with the same `options` resumes
    from the last checkpoint.
    """

    options: FinetuneOptions
    """Model, data, output and training loop: the settings of `port-agent finetune`."""
    ram_bytes: int
    """Resident memory of the whole process."""
    threads: int | None = None
    """Number of threads; None: all usable cores. Another number may sum in another order."""
    page_dir: Path | None = None
    """Directory for pages; None: the working directory."""


def finetune(request: FinetuneRequest, on_event: OnEvent = no_listener) -> TrainReport:
    """Fine-tune in a separate process to the end, or after Ctrl-C to a checkpoint of the finished updates. Its
    notes go to standard output.

    Raises FinetuneError, OSError, and TrainingFailedError with the worker's reason.
    """
    threads = request.threads or usable_cores()
    given = request.options
    options = replace(
        given,
        model=_absolute(given.model),
        data=tuple(map(_absolute, given.data)),
        valid=tuple(map(_absolute, given.valid)),
        begin_from=None if given.begin_from is None else _absolute(given.begin_from),
        out=_absolute(given.out),
        events=None if given.events is None else _absolute(given.events),
    )
    page_dir = request.page_dir or Path.cwd()
    job = FinetuneJob.of(options, ram_bytes=request.ram_bytes, threads=threads, page_dir=page_dir)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job"
        file.write_bytes(job.encoded())
        words = FinetuneWorkerOptions(bundle=file, state_dir=Path(folder)).words()
        worker = start_worker([*FINETUNE_WORKER, *words], limit_bytes=request.ram_bytes, threads=threads)
        with ForegroundRun(worker, first_stop=_LEAVE_WITH_CHECKPOINT) as run:
            return run.finish(on_event)


def _absolute(place: str) -> str:
    return str(Path(place).absolute())
