"""What `plan` is asked for. Loads nothing heavy."""

from dataclasses import dataclass
from datetime import time
from pathlib import Path

from port_planner.base.errors import ExitCode, PortError
from port_planner.ir.costs import MediumKind


class RequestError(PortError):
    """Settings of a request that do not go together, or that name what is not there."""

    exit_code = ExitCode.IMPOSSIBLE


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A script to plan for a RAM budget. What is None is chosen by what is measured, or not limited.

    The settings are those of `port-agent plan`, whose help says more of each.
    """

    script: Path
    """A Python file with a function `port_job()`."""
    out: Path
    """The bundle to write."""
    ram_bytes: int
    """Resident memory of the whole process."""
    device_ram_bytes: int | None = None
    """Memory of a device that has its own."""
    recording_device_ram_bytes: int | None = None
    """What plain PyTorch's steps may take of it while they are recorded; None: as `device_ram_bytes`."""
    device: str | None = None
    """Where the step computes: cpu, cuda or mps; None: where the script's model lies."""
    place: str | None = None
    """A device beside the CPU, or teams of its threads (`cpu:1,cpu:4`), to divide operators among."""
    threads: int | None = None
    """Per operator."""
    board: str | None = None
    """A board that is not at hand, for which costs measured here are scaled."""
    page_dirs: tuple[Path, ...] = ()
    """Where flash is measured, the first that of weights and state; none: where the process stands. They are there."""
    medium: MediumKind | None = None
    """What pages are written to; None: what the first of `page_dirs` lies on, or the board has."""
    written_bytes_per_step: int | None = None
    flash_life_s: float | None = None
    """Write so little that the flash lasts so long if training never stops."""
    flash_read_bytes_per_s: float | None = None
    """Plan for flash no faster than this."""
    flash_write_bytes_per_s: float | None = None
    config: Path | None = None
    """A file of settings, whose `[energy]` says watts and prices; None: the system's, if there is one."""
    deadline_at: float | None = None
    """When training is to be done, in seconds since 1970."""
    charging: tuple[time, time] | None = None
    """The hours in which it trains; None: all day."""
    epochs: int | None = None
    """Passes over the data, for a schedule's table, and for the deadline; None: the job's."""
    compared_steps: int | None = None
    """First steps that must equal plain PyTorch's; None: one more than batches make an update."""
    pruned_share: float | None = None
    """Of each weight matrix, set to zero in the first half of the epochs."""
    reordered: bool = False
    """Whether sums may be added in another order, and nothing is compared."""
    sparse_update: bool = False
    """Whether only what gains most is trained, so that nothing is paged."""
    probe_steps: int = 20
    """Batches of each short training of `sparse_update`."""
    step_joules: float | None = None
    """Energy that a step of `sparse_update` may take."""
    strategy: str = "milp"
    time_limit_s: float = 12.0
    """Of planning, for each graph."""
    frontier: bool = False
    """Whether more plans for smaller budgets are put in, each by the chosen strategy."""
    solve_on: str | None = None
    """A paired device that solves, or `any`."""
    runtime_dir: Path | None = None
    """Where the control socket of the agent is that knows paired devices; None: of the system's, or of this user's."""
    write_model: Path | None = None
    """Where to write the planning model in the LP format."""
