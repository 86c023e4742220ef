"""`show`: the contents of a bundle, in figures and pictures."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from port_agent.cli.arguments import (
    UsageError,
    readable_file,
    whole_number,
    writable_file,
)
from port_agent.cli.plan.facts import facts_of, print_facts, print_packings
from port_agent.cli.terminal import draw, terminal

if TYPE_CHECKING:
    from port_planner.ir.bundle.bundle import Bundle
    from port_planner.ir.bundle.manifest import Manifest


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `show`."""
    _add_show(commands)


def _add_show(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "show",
        help="show what a bundle keeps, recomputes and pages",
        description="Show a bundle: budget, planned peak, what is kept, recomputed and paged, and memory over the step.",
    )
    parser.add_argument("bundle", type=readable_file, help="file made by `port-agent plan`")
    parser.add_argument(
        "--plan", type=whole_number(0), default=0, help="number of the plan in the bundle, from 0 (default 0)"
    )
    parser.add_argument("--html", type=writable_file, metavar="FILE", help="write the plot as a web page")
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.set_defaults(run=_show)


def _show(arguments: argparse.Namespace) -> int:
    from port_planner.ir.bundle.bundle import Bundle

    bundle = Bundle(arguments.bundle)
    manifest = bundle.manifest
    if not 0 <= arguments.plan < len(manifest.plans):
        raise UsageError(
            f"{arguments.bundle} has {len(manifest.plans)} plans, counted from 0; there is no plan {arguments.plan}"
        )
    facts = facts_of(arguments.bundle, bundle, arguments.plan)
    if arguments.json:
        print(msgspec.json.encode(facts).decode())
        return 0
    print_facts(arguments.bundle, facts, manifest)
    print_packings(facts)
    _plot(bundle, arguments.plan)
    _plot_frontier(manifest)
    if arguments.html:
        _draw(bundle, arguments.plan, arguments.html)
    return 0


def _draw(bundle: "Bundle", index: int, target: Path) -> None:
    """Write the page that shows tensors and memory over time."""
    from port_planner.draw.drawing import bundle_drawing
    from port_planner.draw.frontier import Mark
    from port_planner.draw.page import write_drawing

    marks = [Mark(i, c.computing_peak_bytes, c.seconds, c.joules) for i, c in enumerate(bundle.manifest.plans)]
    target = target if target.suffix else target.with_suffix(".html")
    write_drawing(bundle_drawing(bundle, index), target, marks, index)
    print(f"{target}: tensors over time, memory and budget" + (", and the frontier" if len(marks) > 1 else ""))


def _plot_frontier(manifest: "Manifest") -> None:
    """Draw the bundle's plans in the terminal: joules per step over peak memory."""
    import plotext

    if len(manifest.plans) < 2:
        return
    plans = sorted(manifest.plans, key=lambda c: c.computing_peak_bytes)
    figure = plotext.figure
    figure.clear()
    figure.plot_size(min(terminal().width, 110), 14)
    figure.theme("clear")
    signal = figure.signal([c.computing_peak_bytes / 2**20 for c in plans], [c.joules for c in plans])
    for number in range(1, len(plans)):
        signal.line(number)
    figure.draw(signal)
    figure.title(f"{len(plans)} plans (show --plan N): joules per step over peak MiB")
    text = figure.build().string()
    draw(text if terminal().is_terminal else plotext.uncolorize(text))


def _plot(bundle: "Bundle", index: int) -> None:
    """Draw resident memory over the step's time in the terminal."""
    import plotext

    from port_planner.ir.lowering.lower import lower

    main = bundle.manifest.main_graph
    program = lower(bundle.graphs[main], bundle.costs[main], bundle.plans[index][main])
    moments, clock = [], 0.0
    for op in bundle.costs[main].ops:
        moments.append(clock)
        clock += op.seconds
    choice = bundle.manifest.plans[index]
    budget = (choice.device_ram_bytes or choice.ram_bytes) / 2**20
    figure = plotext.figure
    figure.clear()
    figure.plot_size(min(terminal().width, 110), 18)
    figure.theme("clear")
    curve = figure.signal(moments, [b / 2**20 for b in program.timeline])
    line = figure.signal([moments[0], moments[-1]], [budget, budget])
    for signal, points in ((curve, len(moments)), (line, 2)):
        for number in range(1, points):
            signal.line(number)
        figure.draw(signal)
    memory = "device memory" if choice.device_ram_bytes else "resident memory"
    figure.title(f"{memory} over the step's seconds, MiB; the straight line is the budget")
    figure.ruler("y").lim(0, max(budget, program.peak_bytes / 2**20) * 1.05)
    text = figure.build().string()
    draw(text if terminal().is_terminal else plotext.uncolorize(text))
