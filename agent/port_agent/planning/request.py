"""The request for a plan. Loads nothing heavy."""

from dataclasses import dataclass
from datetime import time
from pathlib import Path

from port_planner.base.errors import ExitCode, PortError
from port_planner.ir.costs import MediumKind


class RequestError(PortError):
    """Settings of a request that exclude each other, or name something that does not exist."""

    exit_code = ExitCode.IMPOSSIBLE


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A script to plan for a RAM budget. None means measured and chosen, or not limited.

    The settings are those of `port-agent plan`, whose help explains each.
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
    """Limit of it for plain PyTorch's steps while they are recorded; None: `device_ram_bytes`."""
    device: str | None = None
    """Device that computes the step: cpu, cuda or mps; None: the one that holds the script's model."""
    place: str | None = None
    """A device other than the CPU, or teams of its threads (`cpu:1,cpu:4`), to divide operators among."""
    threads: int | None = None
    """Threads per operator."""
    board: str | None = None
    """A board that is not here, to which costs measured here are scaled."""
    page_dirs: tuple[Path, ...] = ()
    """Directories where flash is measured, the first for weights and state; none: the working directory. They exist."""
    medium: MediumKind | None = None
    """Medium of pages; None: that of the first of `page_dirs`, or the board's."""
    written_bytes_per_step: int | None = None
    flash_life_s: float | None = None
    """Write so little that the flash lasts so long if training never stops."""
    flash_read_bytes_per_s: float | None = None
    """Plan for flash no faster than this."""
    flash_write_bytes_per_s: float | None = None
    config: Path | None = None
    """A settings file whose `[energy]` gives watts and prices; None: the system's, if it exists."""
    deadline_at: float | None = None
    """Time by which training must be done, in seconds since 1970."""
    charging: tuple[time, time] | None = None
    """The hours in which it trains; None: all day."""
    epochs: int | None = None
    """Passes over the data, for a schedule's table, and for the deadline; None: the job's."""
    compared_steps: int | None = None
    """First steps that must equal plain PyTorch's; None: one more than the batches of an update."""
    pruned_share: float | None = None
    """Share of each weight matrix that is set to zero in the first half of the epochs."""
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
    """Seconds of planning for each graph."""
    iterations: int | None = None
    """Attempts of the search for each graph, in place of seconds."""
    frontier: bool = False
    """Whether more plans for smaller budgets are put in, each by the chosen strategy."""
    solve_on: str | None = None
    """A paired device that solves, or `any`."""
    runtime_dir: Path | None = None
    """Directory of the control socket of the agent that knows paired devices; None: the system's, or this user's."""
    write_model: Path | None = None
    """File for the planning model in the LP format."""
