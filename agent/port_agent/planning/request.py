"""The request for a plan. Loads nothing heavy."""

from dataclasses import dataclass
from datetime import time
from pathlib import Path

from port_planner.base.errors import ExitCode, PortError
from port_planner.ir.costs import MediumKind


class RequestError(PortError):
    """Settings of a request contradict each other, or name something that does not exist."""

    exit_code = ExitCode.IMPOSSIBLE


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A script to plan for a RAM budget. None means measured and chosen, or unlimited.

    The settings are those of `port-agent plan`, whose help explains each.
    """

    script: Path
    """A Python file that defines a function `port_job()`."""
    out: Path
    """Path of the bundle to write."""
    ram_bytes: int
    """Bytes of resident memory of the whole process."""
    device_ram_bytes: int | None = None
    """Bytes of memory of a device that has its own."""
    recording_device_ram_bytes: int | None = None
    """Limit in bytes of that memory for plain PyTorch's steps while they are recorded; None: `device_ram_bytes`."""
    device: str | None = None
    """Device that computes the step: cpu, cuda or mps; None: the one with the script's model."""
    place: str | None = None
    """A device other than the CPU, or teams of its threads (`cpu:1,cpu:4`), among which operators are divided."""
    threads: int | None = None
    """Number of threads per operator."""
    board: str | None = None
    """Another board, to which the costs measured here are scaled."""
    page_dirs: tuple[Path, ...] = ()
    """Existing directories where flash is measured, the first for weights and state; none: the working directory."""
    medium: MediumKind | None = None
    """Medium of pages; None: that of the first of `page_dirs`, or the board's."""
    written_bytes_per_step: int | None = None
    flash_life_s: float | None = None
    """Seconds that the flash must last if training never stops, which limits writing."""
    flash_read_bytes_per_s: float | None = None
    """Largest speed of flash, in bytes per second, for which to plan."""
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
    """Number of first steps that must equal plain PyTorch's; None: one more than the batches of an update."""
    pruned_share: float | None = None
    """Share of each weight matrix that is set to zero in the first half of the epochs."""
    reordered: bool = False
    """Whether sums may be added in a different order, in which case nothing is compared."""
    sparse_update: bool = False
    """Whether to train only the weights that gain most, so that nothing is paged."""
    probe_steps: int = 20
    """Number of batches in each short training of `sparse_update`."""
    step_joules: float | None = None
    """Joules that a step of `sparse_update` may take."""
    strategy: str = "milp"
    time_limit_s: float = 12.0
    """Seconds of planning for each graph."""
    iterations: int | None = None
    """Number of the search's attempts for each graph, instead of seconds."""
    frontier: bool = False
    """Whether to include more plans for smaller budgets, each made by the chosen strategy."""
    solve_on: str | None = None
    """A paired device that solves, or `any`."""
    runtime_dir: Path | None = None
    """Directory of the control socket of the agent that knows paired devices; None: the system's, or this user's."""
    write_model: Path | None = None
    """File for the planning model in the LP format."""
