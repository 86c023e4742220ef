"""The costs of a device's operators, watts and media: this machine's as measured, or those of another board."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from port_agent.energy.media import Medium
from port_agent.energy.sources.estimated import PowerModel
from port_agent.prepare.measurement.progress import Progress, part_of, rounds_of
from port_planner.ir.boards import estimated_costs, load_board, op_work
from port_planner.ir.costs import CostTable, DeviceCosts, Flash
from port_planner.ir.graph import StepGraph
from port_planner.profiling import operator_profile
from port_planner.profiling.operator_profile import MeasuredCosts

_FLASH_STAGE = "flash"


def by_class(graphs: Mapping[str, StepGraph], measured: MeasuredCosts, power: PowerModel) -> MeasuredCosts:
    """Return the same costs, with the joules of memory-bound operators at their own watts, where those are known."""
    tables = tuple(
        tuple(
            cost if op_work(graph, index).dense else replace(cost, joules=cost.joules * power.moving_share)
            for index, cost in enumerate(table)
        )
        for graph, table in zip(graphs.values(), measured.ops, strict=True)
    )
    return replace(measured, ops=tables)


def this_device(
    measured: MeasuredCosts, page_dir: Path, threads: int, power: PowerModel, progress: Progress
) -> DeviceCosts:
    """Return the costs of this machine, which draws `power`; bandwidth is measured in `page_dir`."""
    flash = operator_profile.measure_flash(
        page_dir, compute_watts=power.compute_watts, progress=rounds_of(progress, _FLASH_STAGE)
    )
    return DeviceCosts(
        platform.node() or "this machine",
        measured.worker_bytes,
        power.static_watts,
        power.compute_watts,
        flash,
        threads,
    )


def other_board(
    graphs: Mapping[str, StepGraph], measured: MeasuredCosts, device: DeviceCosts, name: str
) -> tuple[MeasuredCosts, DeviceCosts]:
    """Return the measured costs scaled to another board (by name or file), and that board's device (estimated)."""
    board = load_board(name)
    tables = [
        estimated_costs(graph, board, CostTable(device, ops))
        for graph, ops in zip(graphs.values(), measured.ops, strict=True)
    ]
    return replace(measured, ops=tuple(table.ops for table in tables)), tables[0].device


def slower_flash(device: DeviceCosts, read_bytes_per_s: float | None, write_bytes_per_s: float | None) -> DeviceCosts:
    """Return the device with a medium no faster than the given limits, which then takes more joules per byte."""
    flash = device.flash
    read = min(flash.read_bytes_per_s, read_bytes_per_s or flash.read_bytes_per_s)
    write = min(flash.write_bytes_per_s, write_bytes_per_s or flash.write_bytes_per_s)
    more_read = operator_profile.medium_joules(read) - operator_profile.medium_joules(flash.read_bytes_per_s)
    more_write = operator_profile.medium_joules(write) - operator_profile.medium_joules(flash.write_bytes_per_s)
    slower = replace(
        flash,
        read_bytes_per_s=read,
        read_joules_per_byte=flash.read_joules_per_byte + more_read,
        write_bytes_per_s=write,
        write_joules_per_byte=flash.write_joules_per_byte + more_write,
    )
    return replace(device, flash=slower)


def on_medium(device: DeviceCosts, medium: Medium) -> DeviceCosts:
    """Return the device with flash of this kind: its endurance, and the price of a written byte's wear."""
    return replace(device, flash=_of_kind(device.flash, medium))


def with_scratch(device: DeviceCosts, media: Sequence[tuple[Path, Medium]], progress: Progress) -> DeviceCosts:
    """Return the device with further media for storages that live within a step, each measured in its directory."""
    further = []
    for done, (folder, medium) in enumerate(media):
        rounds = rounds_of(part_of(progress, done, len(media)), _FLASH_STAGE)
        flash = operator_profile.measure_flash(folder, compute_watts=device.compute_watts, progress=rounds)
        further.append(_of_kind(flash, medium))
    return replace(device, scratch_targets=tuple(further))


def _of_kind(flash: Flash, medium: Medium) -> Flash:
    return replace(
        flash,
        name=medium.kind.value,
        endurance_bytes=medium.endurance_bytes,
        wear_joules_per_byte=medium.wear_joules_per_byte,
    )
