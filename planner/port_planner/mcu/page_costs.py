"""The cost of a page on a board's external memory: speed, energy and endurance from the board
file, checksum by the core.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from port_planner.base.errors import ExitCode, PortError
from port_planner.ir.boards import load_board
from port_planner.mcu.core_costs import CoreCosts
from port_planner.problem.problem import Paging

INSTRUCTIONS_PER_BYTE = 1.6
"""Instructions of the core for a page in one direction, counted on the emulated Cortex-M4F with pages of 3 KB.

They are its checksum (firmware/engine/pager.c) and the copy by a memory-mapped driver.
"""


class PageMedium(Enum):
    """External memory that pages go to."""

    PSRAM = "psram"
    NOR = "nor"
    SD = "sd"

    @property
    def block_bytes(self) -> int:
        """The smallest unit that the driver writes."""
        return {PageMedium.PSRAM: 4, PageMedium.NOR: 4096, PageMedium.SD: 512}[self]

    @property
    def holds_parameters(self) -> bool:
        """Whether trained parameters may live there: it is mapped into memory, where host and snapshots find them."""
        return self is PageMedium.PSRAM


class MediumError(PortError):
    """Raised for a medium that a board's file does not describe."""

    exit_code = ExitCode.IMPOSSIBLE


@dataclass(frozen=True, slots=True)
class PageCosts:
    """One medium on one board. `core_seconds_per_byte`: the core's own time.

    `endurance_cycles`: how often a block can be written; None if nothing wears, or if the
    medium levels its wear itself.
    """

    medium: PageMedium
    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_s: float
    read_joules_per_byte: float
    write_joules_per_byte: float
    endurance_cycles: float | None
    core_seconds_per_byte: float
    core_watts: float

    def written(self, nbytes: int) -> int:
        """Return the bytes that wear when a page of `nbytes` is written."""
        block = self.medium.block_bytes
        return -(-nbytes // block) * block

    def waited(self, nbytes: int, seconds: float, joules: float) -> float:
        """Return the joules of a transfer in one direction that the core waits for: the core's and the medium's."""
        return joules + (seconds - self.core_seconds_per_byte * nbytes) * self.core_watts

    def paging(self, nbytes: int) -> Paging:
        """Return a page's round trip by DMA alongside other work; the checksum counts in each direction."""
        cpu = self.core_seconds_per_byte * nbytes
        written = self.written(nbytes)
        return Paging(
            0,
            self.latency_s + written / self.write_bytes_per_s + cpu,
            self.latency_s + nbytes / self.read_bytes_per_s + cpu,
            written * self.write_joules_per_byte + cpu * self.core_watts,
            nbytes * self.read_joules_per_byte + cpu * self.core_watts,
        )


def page_costs(board: str, medium: PageMedium, core: CoreCosts) -> PageCosts:
    """Return the costs of a medium on a shipped board.

    Raises BoardError for an unknown board, MediumError if its file does not describe the medium.
    """
    found, name = load_board(board), medium.value
    missing = [key for key in FIGURES if f"{name}_{key}" not in found.numbers]
    if missing:
        raise MediumError(f"the board file of {board} has no figures for {name}; add {name}_{missing[0]} and the like")
    endurance = found.numbers.get(f"{name}_endurance_cycles")
    read, write, latency, read_joules, write_joules = (found[f"{name}_{key}"] for key in FIGURES)
    return PageCosts(
        medium,
        read,
        write,
        latency,
        read_joules,
        write_joules,
        None if endurance is None else endurance.value,
        INSTRUCTIONS_PER_BYTE * core.seconds_per_instruction,
        core.watts,
    )


FIGURES = ("read_bytes_per_s", "write_bytes_per_s", "latency_s", "read_joules_per_byte", "write_joules_per_byte")
"""Keys of a medium in a board file, prefixed with the medium's name; `endurance_cycles` is set if it wears."""
