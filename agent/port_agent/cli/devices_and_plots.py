"""`boards`, `profile`, `draw` and `frontier`: devices, their costs, and pictures of plans."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from port_agent.cli.arguments import (
    UsageError,
    deadline,
    duration,
    hours,
    positive_number,
    readable_file,
    size,
    whole_number,
    writable_file,
    writable_folder,
)
from port_agent.cli.terminal import terminal
from port_agent.control import places
from port_agent.planning.pace import too_slow, wanted_pace
from port_planner.base.units import format_bytes, format_joules, format_seconds
from port_planner.ir.device_kinds import CPU, accelerator_of
from port_planner.ir.devices.transfers import transfer_of

if TYPE_CHECKING:
    from port_agent.energy.sources.power_source import PowerSource
    from port_planner.ir.boards import Board
    from port_planner.ir.costs import CostTable
    from port_planner.ir.graph import StepGraph
    from port_planner.search.pareto import Point

TRANSFER = "transfer"
"""Name of the transfer of a storage between two devices; it is listed with the device that receives it."""
BITWISE, REORDERED = "same bits", "reordered"
"""Results of comparing a variant with the recorded operator. Tiles whose bits differ are not used here."""


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands of this area to `commands`."""
    _add_boards(commands)
    _add_profile(commands)
    _add_draw(commands)
    _add_frontier(commands)


def _add_boards(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("boards", help="list the shipped boards, or show one with the source of every number")
    parser.add_argument("board", nargs="?", help="name of a shipped board or a board file")
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.set_defaults(run=_boards)


def _add_profile(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "profile",
        help="measure this machine and write a board file",
        description="Measure arithmetic rate, memory bandwidth, flash and the memory of an empty worker on this "
        "machine. With a power sensor, also calibrate watts (at rest, one core, all cores, memory traffic) "
        "and the joules of flash, which takes a minute. Without a sensor, give the watts; otherwise the "
        "file marks them as assumed. `energy.board` in the configuration makes plans and "
        "estimates use the file.",
        epilog="examples:\n"
        "  port-agent profile -o my-pi.toml --static-watts 2.9 --compute-watts 3.4\n"
        "  port-agent profile --ops job.port                   the operators of a step, as they were measured for planning\n",
    )
    parser.add_argument(
        "--ops",
        type=readable_file,
        metavar="BUNDLE",
        help="measure nothing; print what each operator of the bundle's step takes, whole and in tiles, and where it "
        "runs",
    )
    parser.add_argument(
        "--plot",
        type=writable_file,
        metavar="FILE.svg",
        help="with --ops: draw seconds per call over the memory that a call touches",
    )
    parser.add_argument("--json", action="store_true", help="print the table of --ops as JSON")
    parser.add_argument(
        "-o", "--out", type=writable_file, default=Path("board.toml"), help="file to write (default board.toml)"
    )
    parser.add_argument(
        "--page-dir",
        type=writable_folder,
        default=Path(),
        help="directory on the flash to measure (default: the current one)",
    )
    parser.add_argument(
        "--flash-writes",
        type=size,
        metavar="SIZE",
        help="write at most this much to find the write speed once the medium's cache is full (default 4G, and two "
        "minutes)",
    )
    parser.add_argument("--threads", type=whole_number(1, 1024), default=1, help="threads per operator (default 1)")
    parser.add_argument("--static-watts", type=positive_number, help="watts of the machine at rest, from a meter")
    parser.add_argument("--compute-watts", type=positive_number, help="watts that full load adds, from a meter")
    parser.add_argument(
        "--config",
        type=readable_file,
        metavar="FILE",
        help=f"configuration whose [energy] names the sensor (default: {places.SYSTEM_CONFIG} if it exists)",
    )
    parser.set_defaults(run=_profile)


def _add_draw(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "draw",
        help="draw a plan: tensors over time, memory curve and budget",
        description="Draw what a bundle's plan keeps, recomputes and pages, as .svg or .html.",
    )
    parser.add_argument("bundle", type=readable_file, help="file made by `port-agent plan`")
    parser.add_argument("out", type=writable_file, help="file that ends in .svg or .html")
    parser.add_argument(
        "--plan", type=whole_number(0), default=0, help="number of the plan in the bundle, from 0 (default 0)"
    )
    parser.set_defaults(run=_draw)


def _add_frontier(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "frontier",
        help="show the plans over RAM, time and energy that a bundle's step allows",
        description="Plan a bundle's step for several budgets and show the plans that no other beats in memory, time "
        "and energy; with --deadline, say which of them meet it.",
        epilog="example:\n  port-agent frontier job.port --deadline 8h --epochs 3 --charging 22:00-07:00\n",
    )
    parser.add_argument("bundle", type=readable_file, help="file made by `port-agent plan`")
    parser.add_argument("--ram", type=size, help="largest budget (default: what keeping everything takes)")
    parser.add_argument("--count", type=whole_number(1, 1000), default=4, help="number of budgets (default 4)")
    parser.add_argument(
        "--time-limit", type=duration, default=40.0, metavar="SECONDS", help="seconds of planning in total (default 40)"
    )
    parser.add_argument("--strategy", default="milp", help="planner (default milp; greedy is the fastest)")
    add_deadline(parser)
    parser.add_argument(
        "--epochs", type=whole_number(1), default=1, help="epochs to finish by the deadline (default 1)"
    )
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.set_defaults(run=_frontier)


def add_deadline(parser: "argparse._ActionsContainer") -> None:
    """Add --deadline and --charging, which `wanted_pace` reads."""
    parser.add_argument("--deadline", type=deadline, metavar="WHEN", help='"8h", "3d", "07:00" or "2026-12-24 18:00"')
    parser.add_argument("--charging", type=hours, metavar="HOURS", help="such as 22:00-07:00: when training may run")


def _boards(arguments: argparse.Namespace) -> int:
    from rich.table import Column, Table

    from port_planner.ir.boards import board_names, load_board

    console = terminal()
    if arguments.board is not None:
        board = load_board(arguments.board)
        if arguments.json:
            print(json.dumps(_board_data(board)))
            return 0
        table = Table("figure", "value", "unit", "kind", "source", title=board.title)
        for key, n in board.numbers.items():
            table.add_row(key, f"{n.value:g}", n.unit, n.kind, n.source)
        console.print(table)
        return 0
    boards = [load_board(name) for name in board_names()]
    if arguments.json:
        print(json.dumps([_board_data(board) for board in boards]))
        return 0
    table = Table(
        Column("board", no_wrap=True), "what it is", "RAM", "arithmetic", "flash in/out", "watts at rest + busy"
    )
    for board in boards:
        table.add_row(
            board.name,
            board.title,
            format_bytes(board["ram_bytes"]),
            f"{board['flops_per_s'] / 1e9:.3g} GFLOP/s",
            f"{board['read_bytes_per_s'] / 1e6:.3g} / {board['write_bytes_per_s'] / 1e6:.3g} MB/s",
            f"{board['static_watts']:g} + {board['compute_watts']:g}",
        )
    console.print(table)
    console.print(
        "Figures that were not measured on the board itself are estimates; `port-agent boards NAME` marks them."
    )
    return 0


def _board_data(board: "Board") -> dict[str, object]:
    numbers = {
        key: {"value": n.value, "unit": n.unit, "kind": n.kind, "source": n.source} for key, n in board.numbers.items()
    }
    return {"name": board.name, "title": board.title, "kind": board.kind, "numbers": numbers}


_WORDS = frozenset({"operator", "variant", "calls", "most in module"})
"""Columns of text, which are aligned to the left."""


@dataclass(slots=True)
class OperatorSum:
    """The cost of all calls of one variant of an operator in a step, on one kind of device.

    `workspace_bytes`: workspace of the largest call. `variant`: whole, or the number of tiles. `phases`: number of
    calls in the forward pass, the backward pass and the update. `elsewhere_seconds`: time measured on the other device,
    where operators are divided between two; None if that device lacks one of them.
    """

    name: str
    device: str
    variant: str
    exactness: str = BITWISE
    phases: dict[str, int] = field(default_factory=dict)
    calls: int = 0
    seconds: float = 0.0
    joules: float = 0.0
    workspace_bytes: int = 0
    elsewhere_seconds: float | None = None
    modules: dict[str, float] = field(default_factory=dict)
    """Seconds by module, for calls that take a module's weights."""


def operator_sums(graph: "StepGraph", costs: "CostTable", reordered: Sequence[str] = ()) -> list[OperatorSum]:
    """Return the costs of a step's operators by name, device and variant, the longest first.

    `reordered`: operators that may add in a different order on each run on their device.
    """
    found: dict[tuple[str, str, str, str], OperatorSum] = {}
    everywhere = costs.elsewhere or (None,) * len(costs.ops)
    for i, (op, cost, other) in enumerate(zip(graph.ops, costs.ops, everywhere, strict=True)):
        device, name = where_it_runs(graph, i), op.name.removeprefix("aten::")
        if (moved := transfer_of(graph, op)) is not None:
            device, name = graph.storages[moved.target].device, TRANSFER
        variant = "whole" if op.tile is None else f"{op.tile.count} tiles"
        sums = op.tile is not None and op.tile.reordered
        exactness = REORDERED if sums or op.name in reordered or name in reordered else BITWISE
        first = OperatorSum(name, device, variant, exactness, elsewhere_seconds=0.0 if costs.elsewhere else None)
        one = found.setdefault((name, device, variant, exactness), first)
        one.calls += 1
        one.phases[op.phase.name.lower()] = one.phases.get(op.phase.name.lower(), 0) + 1
        one.seconds += cost.seconds
        if module := graph.module_of(i):
            one.modules[module] = one.modules.get(module, 0.0) + cost.seconds
        one.joules += cost.joules
        one.workspace_bytes = max(one.workspace_bytes, cost.workspace_bytes, cost.beside_bytes)
        before, one.elsewhere_seconds = one.elsewhere_seconds, None
        if before is not None and other is not None:
            one.elsewhere_seconds = before + other.seconds
    return sorted(found.values(), key=lambda one: (-one.seconds, one.name, one.variant))


def where_it_runs(graph: "StepGraph", op: int) -> str:
    """Return the kind of device on which an operator runs."""
    return accelerator_of(graph.storages[s].device for s in (*graph.reads[op], *graph.creates[op]))


def _operators(path: Path, plot: Path | None, *, as_json: bool) -> int:
    """Print the costs of the operators of a bundle's step, and draw them if asked."""
    from rich.table import Table

    from port_planner.ir.bundle.bundle import Bundle

    bundle = Bundle(path)
    main = bundle.manifest.main_graph
    graph, costs = bundle.graphs[main], bundle.costs[main]
    sums = operator_sums(graph, costs, bundle.manifest.reordered)
    if plot is not None:
        _write_plot(graph, costs, f"{bundle.manifest.name}: operators of a step", plot)
    if as_json:
        print(msgspec.json.encode(sums).decode())
        return 0
    how = "estimated" if bundle.manifest.estimated else "measured"
    table = Table(
        title=f"{path}: operators of a step on {bundle.manifest.device}, {how} one by one",
        caption="tiles give the same bits as the whole operator, except where marked as reordered; compared on the "
        "device that planned",
    )
    divided = bool(bundle.manifest.placed)
    headings = ["operator", "variant", "calls", "time", "share", "energy (estimated)", "workspace", "most in module"]
    for heading in (*headings, *(["chosen", "on the other"] if divided else [])):
        table.add_column(heading, justify="left" if heading in _WORDS else "right", overflow="fold")
    total = sum(one.seconds for one in sums) or 1.0
    for one in sums:
        calls = ", ".join(f"{phase} {number}" for phase, number in one.phases.items())
        table.add_row(
            one.name if divided or one.device == CPU else f"{one.name} ({one.device})",
            one.variant if one.exactness == BITWISE else f"{one.variant}, {one.exactness}",
            calls,
            format_seconds(one.seconds),
            f"{one.seconds / total:.0%}",
            format_joules(one.joules),
            format_bytes(one.workspace_bytes),
            max(one.modules, key=lambda name: one.modules[name], default=""),
            *([one.device, _elsewhere(one)] if divided else []),
        )
    terminal().print(table)
    return 0


def _elsewhere(one: OperatorSum) -> str:
    """Return the time of an operator on the other of two devices, as text."""
    if one.name == TRANSFER:
        return ""
    return "absent there" if one.elsewhere_seconds is None else format_seconds(one.elsewhere_seconds)


def _write_plot(graph: "StepGraph", costs: "CostTable", title: str, path: Path) -> None:
    """Draw the time of calls over the memory that they touch; raises UsageError if the file cannot be written."""
    from port_planner.draw.operator_chart import operators_svg, spots_of

    if path.suffix.lower() != ".svg":
        raise UsageError(f"--plot {path}: name a file that ends in .svg")
    try:
        path.write_text(operators_svg(spots_of(graph, costs), title), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; name another file") from error
    print(f"{path}: seconds per call over the memory that a call touches", file=sys.stderr)


def _profile(arguments: argparse.Namespace) -> int:
    if arguments.ops is not None:
        return _operators(arguments.ops, arguments.plot, as_json=arguments.json)
    if arguments.plot is not None:
        raise UsageError("--plot draws the operators of a bundle; name it: --ops job.port")
    from port_agent.cli.progress import StageBar
    from port_agent.prepare.this_machine import measure_board
    from port_agent.system.atomic_file import write_atomically
    from port_planner.ir.boards import format_board
    from port_planner.profiling.sustained_writes import MAX_BYTES, WINDOW_BYTES

    wanted = {"static_watts": arguments.static_watts, "compute_watts": arguments.compute_watts}
    given = {key: value for key, value in wanted.items() if value is not None}
    source = _best_source(arguments.config)
    try:
        with StageBar(("calibrate",)) as bar:
            share = lambda done: bar.update("calibrate", done)  # noqa: E731
            board, gaps = measure_board(
                arguments.page_dir,
                arguments.threads,
                given=given,
                source=source,
                progress=share,
                max_written_bytes=max(arguments.flash_writes or MAX_BYTES, WINDOW_BYTES),
            )
    finally:
        source.close()
    write_atomically(arguments.out, format_board(board).encode())
    _print_board(arguments.out, board)
    for gap in gaps:
        terminal().print(f"not measured: {gap}", markup=False)
    return 0


def _best_source(config: Path | None) -> "PowerSource":
    """Return the meter that the agent would use; the others are closed."""
    from port_agent.energy.sources.power_models import model_of
    from port_agent.energy.sources.registry import open_sources

    energy, _ = places.energy_settings(config)
    best, *others = open_sources(energy, model_of(energy.board), Path("/")).sources
    for other in others:
        other.close()
    return best


def _print_board(out: Path, board: "Board") -> None:
    """Print the measured figures next to those of the shipped file of this board, if there is one."""
    from rich.table import Table

    from port_agent.energy.sources.power_models import detect_board
    from port_planner.ir.boards import load_board

    known = detect_board(Path("/"))
    shipped = None if known is None else load_board(known)
    table = Table("figure", "value", "unit", "kind", title=f"{out}: {board.title}")
    if shipped is not None:
        table.add_column(f"{shipped.name} as shipped")
    for key, number in board.numbers.items():
        other = None if shipped is None else shipped.numbers.get(key)
        row = [key, f"{number.value:.6g}", number.unit, number.kind]
        table.add_row(*row, *([f"{other.value:g} ({other.kind})"] if other is not None else []))
    terminal().print(table)


def _draw(arguments: argparse.Namespace) -> int:
    from port_planner.draw.drawing import bundle_drawing
    from port_planner.draw.page import write_drawing
    from port_planner.ir.bundle.bundle import Bundle

    bundle = Bundle(arguments.bundle)
    if not 0 <= arguments.plan < len(bundle.plans):
        raise UsageError(
            f"{arguments.bundle} has {len(bundle.plans)} plans, counted from 0; there is no plan {arguments.plan}"
        )
    picture = bundle_drawing(bundle, arguments.plan)
    write_drawing(picture, arguments.out)
    print(f"{arguments.out}: {picture.title}")
    return 0


def _frontier(arguments: argparse.Namespace) -> int:
    from port_planner.ir.bundle.bundle import Bundle
    from port_planner.search.pareto import budgets, frontier

    bundle = Bundle(arguments.bundle)
    main = bundle.manifest.main_graph
    graph, costs = bundle.graphs[main], bundle.costs[main]
    limits = budgets(graph, costs, arguments.ram or 1 << 62, arguments.count)
    points = frontier(graph, costs, limits, time_limit_s=arguments.time_limit, strategy=arguments.strategy)
    asked = wanted_pace(arguments.deadline, arguments.charging, arguments.epochs, bundle.manifest.steps_per_epoch())
    wanted = None if asked is None else asked.seconds_per_step
    if arguments.json:
        rows = [_point_data(p) | {"in_time": wanted is None or p.seconds <= wanted} for p in points]
        print(msgspec.json.encode({"seconds_per_step": wanted, "plans": rows}).decode())
        return 0
    print_frontier(points, wanted)
    if asked is not None and points and all(p.seconds > asked.seconds_per_step for p in points):
        print(too_slow(graph, costs, asked, limits[0], min(p.seconds for p in points)))
    return 0


def _point_data(point: "Point") -> dict[str, object]:
    return {
        "peak_bytes": point.peak_bytes,
        "seconds": point.seconds,
        "joules": point.joules,
        "written_bytes": point.written_bytes,
        "budget_bytes": point.plan.ram_bytes,
        "overhead_joules": point.plan.overhead_joules,
        "bound_joules": point.plan.bound_joules,
        "strategy": point.plan.strategy,
    }


def print_frontier(points: "list[Point]", wanted_seconds: float | None) -> None:
    """Print the frontier as a table and, in a terminal, as a plot of energy over memory."""
    from rich.table import Table

    table = Table("plan", "budget", "peak", "step", "energy", "written", "overhead", "in time")
    for k, point in enumerate(points):
        in_time = "" if wanted_seconds is None else "yes" if point.seconds <= wanted_seconds else "no"
        table.add_row(
            str(k),
            format_bytes(point.plan.ram_bytes),
            format_bytes(point.peak_bytes),
            format_seconds(point.seconds),
            format_joules(point.joules),
            format_bytes(point.written_bytes),
            format_joules(point.plan.overhead_joules),
            in_time,
        )
    console = terminal()
    console.print(table)
    if wanted_seconds is not None:
        console.print(f"the deadline leaves {format_seconds(wanted_seconds)} per step")
