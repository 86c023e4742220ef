"""Commands about energy: a report of what was used and why (`energy`), and the live page (`dashboard`)."""

import argparse
import csv
import json
import os
import socket
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from port_agent.cli.arguments import (
    UsageError,
    positive_number,
    readable_file,
    readable_folder,
    since,
    size,
    whole_number,
    writable_file,
)
from port_agent.cli.terminal import draw, terminal
from port_agent.control import places

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

    from rich.console import Console

    from port_agent.energy.report import Amount, EnergyReport, ReportOptions
    from port_agent.energy.sources.power_source import SourceInfo
    from port_agent.energy.sources.registry import SourceReport

_PLOT_COLUMNS = 100


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands of this area to `commands`."""
    text = "show energy and flash wear: by job, day and phase, compared with the plan"
    energy = commands.add_parser("energy", help=text)
    energy.add_argument(
        "--since", type=since, metavar="WHEN", help='"90min", "24h", "7d" or "2026-11-01" (default: all)'
    )
    energy.add_argument("--job", help="only this job (its number)")
    form = energy.add_mutually_exclusive_group()
    form.add_argument(
        "--html", type=writable_file, metavar="FILE", help="write one self-contained page, readable offline"
    )
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--csv", action="store_true", help="print the tables as CSV")
    energy.add_argument("--sources", action="store_true", help="show the sources of this machine and test them")
    energy.add_argument("--price", type=positive_number, metavar="PRICE", help="price of a kWh")
    energy.add_argument("--currency", metavar="NAME", help="its currency, such as EUR")
    energy.add_argument("--co2", type=positive_number, metavar="GRAMS", help="grams of CO2 per kWh of your electricity")
    energy.add_argument("--endurance", type=size, metavar="SIZE", help="bytes that the flash endures, such as 10TB")
    _add_places(energy)
    energy.set_defaults(run=_energy)
    dashboard = commands.add_parser("dashboard", help="serve a live page of the agent on localhost")
    dashboard.add_argument(
        "--port", type=whole_number(0, 65535), default=8765, help="port to listen on (default 8765; 0: any free one)"
    )
    dashboard.add_argument("--no-browser", action="store_true", help="do not open a browser")
    _add_places(dashboard)
    dashboard.set_defaults(run=_dashboard)


def _add_places(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--state-dir", type=readable_folder, metavar="DIR", help="read the ledger in DIR without asking an agent"
    )
    parser.add_argument("--runtime-dir", type=Path, metavar="DIR", help="where the agent's control socket is")
    parser.add_argument(
        "--config",
        type=readable_file,
        metavar="FILE",
        help=f"configuration (default: {places.SYSTEM_CONFIG} if it exists)",
    )


def _energy(arguments: argparse.Namespace) -> int:
    from port_agent.energy.report import csv_rows

    if arguments.sources:
        return _sources(arguments)
    report = _read(arguments, _options(arguments))
    if arguments.html is not None:
        from port_agent.dashboard.page import render_report

        try:
            arguments.html.write_text(render_report(report), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {arguments.html}: {error.strerror}; name another file") from error
        print(f"wrote {arguments.html}", file=sys.stderr)
    elif arguments.json:
        json.dump(report.as_dict(), sys.stdout, indent=1)
        print()
    elif arguments.csv:
        csv.writer(sys.stdout).writerows(csv_rows(report))
    else:
        _show(report)
    return 0


def _options(arguments: argparse.Namespace) -> "ReportOptions":
    from port_agent.energy.report import ReportOptions

    config, budget = places.energy_settings(arguments.config)
    endurance = arguments.endurance or config.flash_endurance_bytes
    return ReportOptions(
        since_unix=arguments.since,
        job=arguments.job,
        price_per_kwh=config.price_per_kwh if arguments.price is None else arguments.price,
        currency=config.currency if arguments.currency is None else arguments.currency,
        co2_grams_per_kwh=config.co2_grams_per_kwh if arguments.co2 is None else arguments.co2,
        flash_bytes_per_day=budget,
        flash_endurance_bytes=endurance,
    )


def _read(arguments: argparse.Namespace, options: "ReportOptions") -> "EnergyReport":
    """Return the report of the running agent, which has the newest figures.

    If no agent answers, return the report of a ledger that this user may read.
    """
    from port_agent.control.client import ControlError
    from port_agent.energy.ledger import FILE_NAME
    from port_agent.energy.report import read_report

    if arguments.state_dir is not None:
        return read_report(arguments.state_dir / FILE_NAME, options)
    try:
        return _ask(places.connect(arguments.runtime_dir).get, options)
    except ControlError:
        folders = () if arguments.runtime_dir is not None else (places.SYSTEM_STATE_DIR, places.own_state_dir())
        ledger = next((folder / FILE_NAME for folder in folders if os.access(folder / FILE_NAME, os.R_OK)), None)
        if ledger is None:
            raise
        return read_report(ledger, options)


def _ask(get: "Callable[[str], Any]", options: "ReportOptions") -> "EnergyReport":
    from dataclasses import asdict
    from urllib.parse import urlencode

    from port_agent.energy.report import report_from_dict

    fields = {key.replace("since_unix", "since"): value for key, value in asdict(options).items()}
    query = urlencode({key: value for key, value in fields.items() if value not in (None, "")})
    return report_from_dict(get(f"/v1/energy?{query}"))


def _sources(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from port_agent.energy.sources.power_models import model_of
    from port_agent.energy.sources.registry import diagnose

    config, _ = places.energy_settings(arguments.config)
    model = model_of(config.board)
    reports = diagnose(config, model, Path("/"))
    if arguments.json:
        json.dump([asdict(report) | {"info": _plain(report.info)} for report in reports], sys.stdout, indent=1)
        print()
    else:
        _show_sources(reports)
    return 0


def _plain(info: "SourceInfo | None") -> object:
    return json.loads(info.as_json()) if info else None


def _show_sources(reports: "Iterable[SourceReport]") -> None:
    """Print the power sources: first those that work, best first, then the broken ones, then
    those that this machine lacks.

    Broken sources are shown with the remedy.
    """
    from rich.padding import Padding
    from rich.text import Text

    console, used = terminal(), False
    for report in reports:
        if not report.present:
            console.print(Text(f"– {report.name}: {report.text}", style="dim"))
            continue
        mark = Text("✓ ", "green") if report.ok else Text("✗ ", "red")
        use = " (in use)" if report.ok and not used else ""
        used = used or report.ok
        console.print(Text.assemble(mark, (report.name, "bold"), f"{use}: {report.text}"))
        for line, style in ((report.info.describe() if report.info else "", ""), (report.remedy, "dim")):
            if line:
                console.print(Padding(Text(line, style=style), (0, 0, 0, 2)))


def _show(report: "EnergyReport") -> None:
    console = terminal()
    if not report.total:
        which = f" of job {report.options.job}" if report.options.job else ""
        console.print(f"The ledger has no figures{which} for this time.")
        return
    _show_power(report, console)
    labels = {amount.name: report.label(amount.name) for amount in report.jobs}
    _show_amounts(console, "by job", report.jobs, labels, report.options.currency)
    _show_gpu(console, report)
    _show_amounts(console, "by day", report.days, {}, report.options.currency)
    _show_phases(console, report)
    _show_plan(console, report)
    _show_notes(console, report)


def _show_power(report: "EnergyReport", console: "Console") -> None:
    """Print power over time as a terminal plot.

    Unmeasured time stays empty.
    """
    import plotext

    times, watts = [], []
    for index, start in enumerate(report.power.start_unix):
        values = [phase[index] for phase in report.power.watts.values()]
        if None not in values and values:
            times.append(start)
            watts.append(sum(value for value in values if value is not None))
    if len(times) < 2:
        return
    figure = plotext.figure
    figure.clear()
    figure.plot_size(min(console.width, _PLOT_COLUMNS), 14)
    figure.theme("clear")
    signal = figure.signal(times, watts)
    for number in range(1, len(times)):
        if times[number] - times[number - 1] <= report.power.period_s:
            signal.line(number)
    figure.draw(signal)
    figure.title("power, W")
    span = max(times) - min(times)
    marks = [min(times) + span * part / 4 for part in range(5)]
    form = "%H:%M" if span < 2 * 86400 else "%d %b"
    figure.ruler("x").ticks(marks, [datetime.fromtimestamp(mark).strftime(form) for mark in marks])
    figure.ruler("y").lim(0, max(watts) * 1.1)
    draw(plotext.uncolorize(figure.build().string()) if not console.is_terminal else figure.build().string())


def _show_amounts(
    console: "Console", title: str, amounts: "tuple[Amount, ...]", names: dict[str, str], currency: str
) -> None:
    kinds = {row.kind for row in amounts}
    columns: dict[str, list[str]] = {
        "": [names.get(row.name, row.name) for row in amounts],
        "energy": [_joules(row.gross_joules) for row in amounts],
        "above idle": ["unknown" if row.net_joules is None else _joules(row.net_joules) for row in amounts],
        "time": [_duration(row.seconds) for row in amounts],
        "not seen": [_duration(row.unmeasured_s) if row.unmeasured_s else "" for row in amounts],
        "steps": ["" if row.steps is None else str(row.steps) for row in amounts],
        f"cost, {currency}" if currency else "cost": ["" if row.cost is None else f"{row.cost:.4f}" for row in amounts],
        "CO2, g": ["" if row.co2_grams is None else f"{row.co2_grams:.2f}" for row in amounts],
        "kind": [row.kind if len(kinds) > 1 else "" for row in amounts],
    }
    _print_table(console, f"{title}, {' and '.join(sorted(kinds))}", columns.items())


def _show_gpu(console: "Console", report: "EnergyReport") -> None:
    """Print the GPU's share of each job's energy if a source reports it. The job's energy includes this share."""
    if report.gpu:
        columns = {
            "": [report.label(one.job) for one in report.gpu],
            "GPU": [_joules(one.joules) for one in report.gpu],
            "time": [_duration(one.seconds) for one in report.gpu],
            "of which": [one.covers for one in report.gpu],
        }
        _print_table(console, "GPU, within the above", columns.items())


def _show_phases(console: "Console", report: "EnergyReport") -> None:
    """Print the energy by job and phase, and the phases that used none.

    The latter are named so that a missing row leaves no doubt.
    """
    from port_agent.energy.report import PHASES

    rows = [row for row in report.phases if row.name != "unmeasured"]
    whole = sum(row.gross_joules for row in rows) or 1.0
    kinds = {row.kind for row in rows}
    columns = {
        "": [row.name.replace("_", " ") for row in rows],
        "energy": [_joules(row.gross_joules) for row in rows],
        "share": [f"{row.gross_joules / whole:.1%}" for row in rows],
        "time": [_duration(row.seconds) for row in rows],
        "kind": [row.kind if len(kinds) > 1 else "" for row in rows],
    }
    _print_table(console, f"by phase, {' and '.join(sorted(kinds))}", columns.items())
    none = [phase.replace("_", " ") for phase in PHASES if phase not in {row.name for row in rows}]
    if none:
        console.print(f"no figures for: {', '.join(none)}\n")


def _print_table(console: "Console", title: str, columns: "Iterable[tuple[str, list[str]]]") -> None:
    """Print columns, the first of which contains the names; columns without any value are left out."""
    from rich.table import Table

    shown = [(head, cells) for head, cells in columns if any(cells)]
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
    for number, (head, _) in enumerate(shown):
        table.add_column(head, justify="right" if number else "left", header_style="dim", no_wrap=True)
    for cells in zip(*(cells for _, cells in shown), strict=True):
        table.add_row(*cells)
    console.print(table, "")


def _duration(seconds: float) -> str:
    from port_planner.base.units import format_seconds

    return format_seconds(seconds).removesuffix(" 00 s").removesuffix(" 00 min")


def _joules(joules: float) -> str:
    from port_planner.base.units import format_joules

    return format_joules(joules) if joules else "0 J"


def _show_plan(console: "Console", report: "EnergyReport") -> None:
    from port_planner.base.units import format_joules, format_seconds

    planned = [epoch for epoch in report.epochs if epoch.planned_s or epoch.planned_joules][-20:]
    if not planned:
        return
    columns = [("", [f"{report.label(epoch.job)}, epoch {epoch.epoch}" for epoch in planned])]
    for form, figures in (
        (format_seconds, [(epoch.planned_s, epoch.wall_s, epoch.steps) for epoch in planned]),
        (format_joules, [(epoch.planned_joules, epoch.gross_joules, epoch.measured_steps) for epoch in planned]),
    ):
        columns += [
            ("planned", [form(plan / steps) if plan and steps else "" for plan, _, steps in figures]),
            ("taken", [form(taken / steps) if steps else "" for _, taken, steps in figures]),
            ("", [f"{taken / plan - 1:+.0%}" if plan and steps else "" for plan, taken, steps in figures]),
        ]
    _print_table(console, "plan and reality, per step", columns)


def _show_notes(console: "Console", report: "EnergyReport") -> None:
    from port_agent.energy.sources.power_source import title_of
    from port_planner.base.units import format_seconds

    for source in report.sources:
        steps = "" if source.resolution_watts is None else f", in steps of {source.resolution_watts:g} W"
        title = title_of(source.name, source.kind)
        console.print(f"{title}: {source.covers}{steps}, every {source.period_s:g} s")
        if source.name in report.baselines_watts:
            console.print(f"  idle power {report.baselines_watts[source.name]:.2f} W")
    _show_wear(console, report)
    for gap in report.gaps[-5:]:
        when = datetime.fromtimestamp(gap.start_unix).strftime("%d %b %H:%M")
        console.print(f"not measured: {when}, {format_seconds(gap.end_unix - gap.start_unix)}: {gap.text}")
    for event in report.events[-5:]:
        console.print(f"{datetime.fromtimestamp(event.start_unix).strftime('%d %b %H:%M')} {event.code}: {event.text}")


def _show_wear(console: "Console", report: "EnergyReport") -> None:
    """Print flash writes of the newest day against the budget, and how long the device lasts at this rate."""
    from port_agent.energy.wear import ASSUMED_CYCLES
    from port_planner.base.units import format_bytes

    view, budget = report.wear_outlook, report.options.flash_bytes_per_day
    if report.wear:
        day = report.wear[-1]
        allowed = f" of {format_bytes(budget)} allowed" if budget else ""
        machine = "" if day.machine_bytes is None else f", {format_bytes(day.machine_bytes)} by the whole machine"
        when = datetime.fromtimestamp(day.day_unix, UTC).strftime("%d %b")
        console.print(f"flash writes on {when}: {format_bytes(day.agent_bytes)} by the agent{allowed}{machine}")
    if view.years_left is not None:
        years = "over 100" if view.years_left > 100 else f"{view.years_left:.1f}"
        console.print(f"  at {format_bytes(view.bytes_per_day)} per day the device lasts {years} years")
        if view.assumed and view.endurance_bytes:
            size = format_bytes(view.endurance_bytes // ASSUMED_CYCLES)
            console.print(
                f"  (assumed: {ASSUMED_CYCLES} cycles of {size}; set energy.flash_endurance_bytes to the real figure)"
            )


def has_screen(environment: "Mapping[str, str]") -> bool:
    """Return whether the user who started a browser here would see it."""
    if "SSH_CONNECTION" in environment:
        return False
    return sys.platform == "darwin" or bool(environment.get("DISPLAY") or environment.get("WAYLAND_DISPLAY"))


def _dashboard(arguments: argparse.Namespace) -> int:
    from port_agent.dashboard.server import Dashboard, open_in_browser
    from port_agent.energy.report import options_from_query

    _, budget = places.energy_settings(arguments.config)

    def energy(query: "Mapping[str, str]") -> "Mapping[str, object]":
        return _read(arguments, options_from_query({"flash_bytes_per_day": str(budget), **query})).as_dict()

    dashboard = Dashboard(places.connect(arguments.runtime_dir), energy, arguments.port)
    print(f"live page: {dashboard.url}\n(stop with Ctrl-C)", flush=True)
    if not has_screen(os.environ):
        print(
            f"From another computer: ssh -L {dashboard.port}:127.0.0.1:{dashboard.port} {socket.gethostname()}, then "
            "open it there",
            flush=True,
        )
    elif not arguments.no_browser:
        open_in_browser(dashboard.url)
    try:
        dashboard.serve_forever()
    except KeyboardInterrupt:
        return 0
    return 0
