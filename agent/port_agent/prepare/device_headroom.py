"""Run plain steps of a job within the device's budget: the recording, and plain PyTorch's
first steps for comparison.
"""

import gc
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from port_agent.backend.base import Backend
from port_agent.prepare.pools import Pools
from port_planner.base.errors import ExitCode, PortError
from port_planner.base.units import format_bytes
from port_planner.capture.saved_on_host import SavedOnHost
from port_planner.ir.device_kinds import CPU
from port_planner.job import TrainingJob
from port_planner.job_device import kind_of_job

Result = TypeVar("Result")

_MIB = 1 << 20

_SAVED_SHARES = (0.5, 0.0)
"""Shares of the budget beyond which tensors saved by autograd go to the host.

Half of the budget leaves memory for gradients, optimizer state and the running operator; if that is not
enough, all saved tensors go.
"""


class DeviceTooSmallError(PortError):
    """A plain step of the job took more of the device's memory than its budget."""

    exit_code = ExitCode.IMPOSSIBLE


def within_device(run: Callable[[], Result], what: str, job: TrainingJob, backend: Backend, pools: Pools) -> Result:
    """Return the result of `run`, described by `what`. If the device runs short, tensors saved
    by autograd go to the host.

    Raises DeviceTooSmallError if it still exceeded the budget. The budget is not enforced, because torch aborts a
    process whose device runs out of memory during a backward pass with hooks.
    """
    if pools.recording_bytes is None or kind_of_job(job) == CPU:
        return run()
    beside, taken = backend.outside_bytes(), 0
    free_bytes = max(0, pools.recording_bytes - beside)
    stay = (*job.model.parameters(), *job.model.buffers())
    for most in (share * free_bytes for share in _SAVED_SHARES):
        gc.collect()
        backend.reset_peak()
        with SavedOnHost(stay, partial(_holds_more, backend, most)):
            result = run()
        taken = backend.peak_bytes()
        if taken <= free_bytes:
            return result
    raise DeviceTooSmallError(
        f"{what} took {format_bytes(taken)} of {backend.kind}'s memory with what autograd saves on the host; the "
        f"budget of {format_bytes(pools.recording_bytes)} leaves {format_bytes(free_bytes)} besides "
        f"{format_bytes(beside)} of context and libraries: let planning alone take more with --recording-gpu-ram "
        f"{(beside + taken) // _MIB + 1}M, raise --gpu-ram, or use a smaller batch"
    )


def _holds_more(backend: Backend, nbytes: float) -> bool:
    return backend.allocated_bytes() > nbytes
