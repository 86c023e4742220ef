"""The costs of a program under a budget: joules, measured or estimated, and wear of the medium."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from port_agent.energy.media import FlashPrices, medium_under
from port_agent.energy.sources.estimated import NAME as ESTIMATED
from port_agent.energy.sources.estimated import PowerModel
from port_agent.energy.sources.power_models import model_of
from port_agent.energy.sources.power_source import Kind, SourceError, title_of
from port_agent.energy.sources.rapl import RaplSource
from port_agent.energy.wear import ASSUMED_CYCLES, DiskCounter
from port_agent.system.clock import now_s
from port_agent.system.mounts import in_ram
from port_planner.base.errors import PortError

_ROOT = Path("/")
_ASSUMED = FlashPrices()

_READ_EVERY_S = 10.0
"""Seconds between readings; counters wrap after a minute at the earliest."""


@dataclass(frozen=True, slots=True)
class Energy:
    """Joules since the start."""

    joules: float
    source: str
    """The source: `measured by rapl` for everything that ran on the processor meanwhile, or
    `estimated` for this process alone.
    """


class EnergyUse:
    """Counts joules from now on: by the processor's counters if readable, otherwise by a model of the board."""

    def __init__(self, root: Path = _ROOT) -> None:
        self._began_s, self._began_cpu_s = time.perf_counter(), time.process_time()
        self._model = _model_of(
            root
        )  # imported now: at the end of a program nothing should be loaded for the first time
        self._counter: RaplSource | None = None
        self._read_s = now_s()
        try:
            self._counter = RaplSource(root)
            self._counter.read(self._read_s)
        except SourceError:
            self._counter = None

    def keep_up(self) -> None:
        """Read the counters before they wrap. Call it often."""
        if self._counter is not None and now_s() - self._read_s > _READ_EVERY_S:
            self._measured()

    def total(self, read_bytes: int, written_bytes: int) -> Energy | None:
        """Return the energy used since the start; None if a model of the board cannot be read."""
        measured = self._measured()
        if measured is not None:
            return Energy(measured, title_of("rapl", Kind.MEASURED.value))
        model = self._model
        if model is None:
            return None
        busy_watts = model.compute_watts / (os.cpu_count() or 1)
        joules = (
            model.static_watts * (time.perf_counter() - self._began_s)
            + busy_watts * (time.process_time() - self._began_cpu_s)
            + model.read_joules_per_byte * read_bytes
            + model.write_joules_per_byte * written_bytes
        )
        return Energy(joules, title_of(ESTIMATED, Kind.ESTIMATED.value))

    def _measured(self) -> float | None:
        """Return the counters' joules; after a failure they are no longer used."""
        if self._counter is None:
            return None
        self._read_s = now_s()
        try:
            return self._counter.read(self._read_s).counter_joules
        except SourceError:
            self._counter = None
            return None


def _model_of(root: Path) -> PowerModel | None:
    try:
        return model_of(root=root)
    except PortError:
        return None


def wear_share(page_dir: Path, written_bytes: int, root: Path = _ROOT) -> float | None:
    """Return the share of its life that writing this much takes of the flash under `page_dir`.

    Its endurance is assumed as a number of cycles of its size. None if it is not flash, or unknown.
    """
    try:
        size = DiskCounter(page_dir, root).flash_bytes()
    except (SourceError, OSError):
        return None
    return written_bytes / (size * ASSUMED_CYCLES) if size else None


def wear_joules_per_byte(page_dir: Path, prices: FlashPrices = _ASSUMED, root: Path = _ROOT) -> float:
    """Return the energy whose price equals the wear of a byte written under `page_dir`; 0 if there is no
    wear, or if it is unknown.
    """
    if in_ram(page_dir):
        return 0.0
    try:
        return medium_under(page_dir, prices, root).wear_joules_per_byte
    except (SourceError, OSError):
        return 0.0
