"""This machine as a board: measured arithmetic, memory and flash, with watts calibrated if there is a meter."""

import os
import platform
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import psutil
import torch

from port_agent.energy.calibration import Calibration, CalibrationError, Estimate, WorkClass
from port_agent.energy.sources.jetson_power_mode import power_mode
from port_agent.energy.sources.power_source import Kind, PowerSource
from port_agent.facts.cpu_clusters import clusters_text, read_clusters
from port_agent.facts.sysfs import Tree
from port_agent.prepare.loads import calibrate
from port_planner.base.units import format_bytes
from port_planner.ir.boards import Board, Number
from port_planner.ir.costs import Flash
from port_planner.profiling.operator_profile import MEDIUM_WATTS, MIN_MEDIUM_JOULES, FlashError, measure_flash
from port_planner.profiling.sustained_writes import MAX_BYTES, SustainedWrite, measure_sustained
from port_planner.profiling.timing import shortest_run_s

_REPEATS = 10
"""Number of runs from which a processor's rate is determined."""
_SMALL_BOARD_WATTS = {"static_watts": 2.0, "compute_watts": 4.0}
"""Watts of a small board, if none were measured."""


def measure_board(
    page_dir: Path,
    threads: int,
    *,
    given: dict[str, float],
    source: PowerSource | None,
    progress: Callable[[float], None],
    max_written_bytes: int = MAX_BYTES,
    root: Path = Path("/"),
) -> tuple[Board, tuple[str, ...]]:
    """Return this machine as a board, and what the meter could not measure.

    Writes at most `max_written_bytes` to find the speed of sustained writing, which becomes the board's; the initial
    speed is listed beside it. Watts are those `given` (`static_watts`, `compute_watts`), or else those that calibration
    with `source` finds, or else assumed. If the meter covers only a part of the machine, its name in the file's sources
    shows which. A Jetson's figures are those of the current power mode, which title and sources name. The title also
    names clusters of different cores.
    """
    torch.set_num_threads(threads)
    mode = power_mode(root)
    now = f"port-agent profile on {platform.node()}, {datetime.now():%Y-%m-%d}, {threads} thread(s)" + _in_mode(mode)
    base = psutil.Process().memory_info().rss
    numbers, gaps = _calibrated(page_dir, source, given, progress, mode)
    for key, fallback in _SMALL_BOARD_WATTS.items():
        if key in given:
            numbers[key] = Number(given[key], "W", "measured", "given on the command line")
        elif key not in numbers:
            numbers[key] = Number(fallback, "W", "assumed", "a small board; measure it and give it on the command line")
    flash = measure_flash(page_dir, compute_watts=numbers["compute_watts"].value)
    writes = _sustained(page_dir, max_written_bytes)

    def measured(value: float, unit: str) -> Number:
        return Number(value, unit, "measured", now)

    rates = {
        "ram_bytes": measured(float(psutil.virtual_memory().total), "B"),
        "base_bytes": measured(float(base), "B"),
        "flops_per_s": measured(_matrix_rate(), "1/s"),
        "memory_bytes_per_s": measured(_copy_rate(), "B/s"),
        "read_bytes_per_s": measured(flash.read_bytes_per_s, "B/s"),
        "write_bytes_per_s": Number(writes.sustained_bytes_per_s, "B/s", "measured", f"{now}; {_ending(writes)}"),
        "burst_write_bytes_per_s": measured(writes.burst_bytes_per_s, "B/s"),
        "latency_s": measured(flash.latency_s, "s"),
    }
    return Board(
        platform.node() or "this machine",
        f"{platform.machine()} {platform.system()}{_clusters(root)}{_in_mode(mode)}",
        "linux",
        rates | _transfers(flash) | numbers,
    ), gaps


def _sustained(page_dir: Path, max_written_bytes: int) -> SustainedWrite:
    try:
        return measure_sustained(page_dir, max_bytes=max_written_bytes)
    except OSError as error:
        raise FlashError(
            f"sustained writing could not be measured under {page_dir}: {error.strerror}; free space there or choose "
            "another --page-dir"
        ) from error


def _ending(writes: SustainedWrite) -> str:
    """Return the number of written bytes at which the speed was measured, and whether it was still falling."""
    after = f"after {format_bytes(writes.written_bytes)} of writing"
    return after if writes.steady else f"{after}, where the speed was not steady yet"


def _clusters(root: Path) -> str:
    """Return the kinds of cores if there are several."""
    found = read_clusters(Tree(sys=root / "sys"))
    return f", {clusters_text(found)}" if len(found) > 1 else ""


def _in_mode(mode: str | None) -> str:
    return "" if mode is None else f", power mode {mode}"


def _transfers(flash: Flash) -> dict[str, Number]:
    source = (
        "CPU time of a transfer, measured, at compute_watts; and the medium's "
        f"{MEDIUM_WATTS:g} W at this bandwidth, at least {MIN_MEDIUM_JOULES:g} J/B"
    )
    return {
        "read_joules_per_byte": Number(flash.read_joules_per_byte, "J/B", "derived", source),
        "write_joules_per_byte": Number(flash.write_joules_per_byte, "J/B", "derived", source),
    }


def _calibrated(
    page_dir: Path,
    source: PowerSource | None,
    given: dict[str, float],
    progress: Callable[[float], None],
    mode: str | None,
) -> tuple[dict[str, Number], tuple[str, ...]]:
    """Return the board's figures from a calibration; none without a power sensor."""
    if source is None or source.info.kind is not Kind.MEASURED or set(given) >= set(_SMALL_BOARD_WATTS):
        return {}, ()
    cores = os.cpu_count() or 1
    try:
        found = calibrate(source, page_dir, cores, progress)
    except CalibrationError as error:
        return {}, (str(error),)
    return board_numbers(found, cores, f"{source.info.name}, {source.info.covers}{_in_mode(mode)}"), found.gaps


def board_numbers(found: Calibration, cores: int, meter: str) -> dict[str, Number]:
    """Return a calibration as figures of a board file, each with its error; unmeasured figures are missing.

    `compute_watts` and `moving_watts` are of all cores, `one_core_watts` of one, all above rest.
    """

    def number(value: float, error: float, unit: str) -> Number:
        share = f"{error / value:.0%}" if value else "100%"
        return Number(value, unit, "measured", f"fitted to {found.runs} runs under {meter}; standard error {share}")

    zero = Estimate(0.0, 0.0)
    active, figures = found.figures.get(WorkClass.ACTIVE, zero), found.figures
    numbers = {"static_watts": number(found.static_watts.value, found.static_watts.error, "W")}
    for key, work, busy in (
        ("compute_watts", WorkClass.DENSE, cores),
        ("one_core_watts", WorkClass.DENSE, 1),
        ("moving_watts", WorkClass.MOVING, cores),
    ):
        if work in figures:
            each = figures[work]
            numbers[key] = number(active.value + busy * each.value, active.error + busy * each.error, "W")
    for key, work in (("read_joules_per_byte", WorkClass.READ), ("write_joules_per_byte", WorkClass.WRITTEN)):
        if work in figures:
            numbers[key] = number(figures[work].value, figures[work].error, "J/B")
    return numbers


def _matrix_rate() -> float:
    """Return fp32 operations per second of a 512 x 512 matrix product, the best of ten."""
    a, b = torch.randn(512, 512), torch.randn(512, 512)
    return 2.0 * 512**3 / shortest_run_s(lambda: torch.mm(a, b), _REPEATS)


def _copy_rate() -> float:
    """Return bytes per second read and written by adding two 32 MiB tensors, the best of ten."""
    a, b, out = (torch.zeros(8 << 20) for _ in range(3))
    return 3.0 * out.numel() * 4 / shortest_run_s(lambda: torch.add(a, b, out=out), _REPEATS)
