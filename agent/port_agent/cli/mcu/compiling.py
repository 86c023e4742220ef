"""`mcu compile`: choose what is trained and how it fits, write the tables, and report the choices."""

import argparse
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from port_agent.cli.mcu.reporting import show_report, write_report
from port_agent.cli.mcu.views import show_json
from port_agent.cli.progress import StageBar
from port_agent.cli.terminal import terminal
from port_agent.mcu.board.board_errors import BoardJobError
from port_agent.mcu.board.catalogue import find_board
from port_agent.mcu.project import (
    MAX_INT8_ERROR,
    Project,
    choose_project,
    count_clipped,
    fit_project,
    freeze_project,
    grow_project,
    hold_project,
    int8_error,
    load_project,
    measures_rate,
    project_figures,
    rate_project,
    value_project,
    weigh_project,
    widen_project,
    without_low_bytes,
    write_project,
)
from port_agent.mcu.protocol.board_model import read_model
from port_agent.mcu.trainer import TrainSettings
from port_planner.base.units import format_joules, format_seconds
from port_planner.mcu.choose_plan import FittedMemory
from port_planner.mcu.schemes.fit import FittedModel
from port_planner.mcu.schemes.race import Finalist
from port_planner.mcu.schemes.rate import RateChoice
from port_planner.mcu.schemes.value import Valuation


@dataclass(frozen=True, slots=True)
class _Choices:
    """The choices made for a project before its tables are written."""

    fitted: FittedModel | None
    """The set of trained weights that was chosen, if one was searched for."""
    valuation: Valuation | None
    """The gain of each candidate per joule, if that determined the choice."""
    held: FittedMemory | None
    """Plan that makes the model fit its budget, if there is one."""
    narrow: tuple[str, ...]
    """Layers whose weights have no low byte although low bytes were requested."""
    rate: RateChoice | None = None
    """The learning rates that were measured, if one had to be chosen."""


def run_compile(arguments: argparse.Namespace) -> int:
    """Run a project and write its tables and data.

    Raises BoardJobError for a deadline, a page medium or a choice per joule without a budget.
    """
    _check_options(arguments)
    out = arguments.out or arguments.project / "build"
    project, choices = _choose(load_project(arguments.project), arguments)
    job = write_project(project, out)
    model = read_model(out)
    error = int8_error(project)
    is_guess = "learning_rate" not in project.settings and model.parameter_bytes > 0
    figures_of_layers = project_figures(project) if arguments.report else ()
    notes, clipped = project.model.quantized.graph.notes, count_clipped(project)
    if arguments.report:
        write_report(figures_of_layers, model.name, out)
    if arguments.json:
        figures = {
            "job": str(job),
            "model": model.name,
            "hash": model.sha256.hex(),
            "arena_bytes": model.arena_bytes,
            "parameter_bytes": model.parameter_bytes,
            "notes": notes,
            "int8_error": error,
            "clipped_values": clipped,
        }
        layers = {"layers": [asdict(layer) for layer in figures_of_layers]} if arguments.report else {}
        show_json(figures | _choices_json(choices, arguments.q88) | layers)
        return 0
    _show_choices(choices)
    for note in notes:
        print(note)
    if error > MAX_INT8_ERROR:
        print(
            f"warning: in int8 the logits are off by {error:.0%} of their spread over the samples, so this is a "
            "different model; look for outliers in the calibration data; --report shows which layer loses the accuracy"
        )
    if clipped:
        print(
            f"{clipped:,} values of train_x and test_x lie outside the range of the calibration data and are clipped; "
            "calibrate with more samples"
        )
    if is_guess:
        print(
            f"learning rate {TrainSettings().learning_rate:g} by default, not measured on your samples: --choose-rate "
            "does that"
        )
    if arguments.report:
        show_report(figures_of_layers, find_board(project.board).figures)
    print(f"{model.name}: arena {model.arena_bytes:,} B, trained parameters {model.parameter_bytes:,} B; wrote {out}")
    print(f"next: port-agent mcu simulate {out}, or port-agent mcu flash --board BOARD {out}")
    return 0


def _check_options(arguments: argparse.Namespace) -> None:
    options = ("growth", "q88", "sparse_update", "dynamic_update", "per_joule")
    if arguments.inference and any(getattr(arguments, name) for name in options):
        raise BoardJobError(
            "--inference trains nothing; leave out --growth, --q88, --sparse-update, --dynamic-update and --per-joule, "
            "which say how to train"
        )
    if arguments.ram is None:
        if arguments.deadline is not None:
            raise BoardJobError("--deadline says how fast a plan within --ram must be; give --ram too")
        if arguments.page is not None:
            raise BoardJobError("--page says where a plan within --ram may put what does not fit; give --ram too")
        if arguments.per_joule:
            raise BoardJobError("--per-joule chooses among plans within --ram; give --ram too")
    if arguments.per_joule and arguments.dynamic_update is not None:
        raise BoardJobError(
            "--per-joule measures the training of whole layers, --dynamic-update trains a share of each; give one of "
            "them"
        )


def _choose(project: Project, arguments: argparse.Namespace) -> tuple[Project, _Choices]:
    """Return the project as changed by the options, and the choices made on the way."""
    fitted = valuation = held = None
    if arguments.growth is not None:
        project = grow_project(project, arguments.growth)
    if arguments.weights is not None:
        project = weigh_project(project, arguments.weights)
    if arguments.inference:
        project = freeze_project(project)
    if arguments.q88:
        project = widen_project(project)
    if arguments.sparse_update is not None:
        with StageBar(("analyse",), quiet=arguments.json) as bar:
            project, fitted = fit_project(
                project, arguments.sparse_update, lambda done, total: bar.update("analyse", done / total)
            )
    if arguments.dynamic_update is not None:
        project = choose_project(project, arguments.dynamic_update)
    if arguments.per_joule:
        with StageBar(("measure",), quiet=arguments.json) as bar:
            project, valuation = value_project(
                project,
                arguments.ram,
                arguments.deadline,
                arguments.page,
                lambda done, total: bar.update("measure", done / total),
            )
        held = valuation.chosen.fitted
    elif arguments.ram is not None:
        project, held = hold_project(project, arguments.ram, arguments.deadline, arguments.page)
    rate = None
    if measures_rate(project) if arguments.choose_rate is None else arguments.choose_rate:
        with StageBar(("rate",), quiet=arguments.json) as bar:
            project, rate = rate_project(project, lambda done, total: bar.update("rate", done / total))
    return project, _Choices(fitted, valuation, held, tuple(without_low_bytes(project)) if arguments.q88 else (), rate)


def _choices_json(choices: _Choices, has_low_bytes: bool) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    if choices.fitted is not None:
        figures["scheme"] = _fitted_json(choices.fitted)
    if choices.valuation is not None:
        figures["per_joule"] = _valuation_json(choices.valuation)
    if choices.held is not None:
        figures["plan"] = _held_json(choices.held)
    if choices.rate is not None:
        figures["learning_rate"] = _rate_json(choices.rate)
    if has_low_bytes:
        figures["without_low_bytes"] = choices.narrow
    return figures


def _show_choices(choices: _Choices) -> None:
    if choices.fitted is not None:
        _show_fitted(choices.fitted)
    if choices.valuation is not None:
        _show_valuation(choices.valuation)
    if choices.held is not None:
        _show_held(choices.held)
    if choices.narrow:
        names = ", ".join(choices.narrow)
        print(f"low bytes do not fit for {names}; the Q8.8 rule rounds their weights stochastically")
    if choices.rate is not None:
        _show_rate(choices.rate)


def _rate_json(found: RateChoice) -> dict[str, Any]:
    """Return the accuracy of each learning rate on held-out samples, as shares."""
    measured = [{"rate": each.rate, "accuracy": each.accuracy} for each in found.measured]
    return {
        "chosen": found.best.rate,
        "untrained": found.untrained,
        "measured": measured,
        "weights_at_limit": dict(found.at_limit),
    }


def _show_rate(found: RateChoice) -> None:
    listed = ", ".join(f"{each.rate:g}: {each.accuracy:.1%}" for each in found.measured)
    what = "explained variance of held-out samples" if found.explains else "on held-out samples"
    print(f"learning rate {found.best.rate:g}; {what} {listed}, untrained: {found.untrained:.1%}")
    if not found.helps:
        print(
            "no learning rate gives a better result than the untrained model: give more samples, or train other layers"
        )
    for layer in found.cramped:
        print(
            f"{layer}: {found.at_limit[layer]:.0%} of its weights end at the limit of their range and cannot grow; if "
            "the module has random weights, --growth 8 lets them become 8 times as large"
        )


def _fitted_json(fitted: FittedModel) -> dict[str, Any]:
    """Return the scheme that `mcu compile --sparse-update` chose, and the alternatives, as JSON.

    `proven`: no scheme within the limits is predicted to do better than the knapsack's answer.
    """
    return _finalist_json(fitted.best) | {
        "proven": fitted.optimum.proven,
        "untrained": fitted.table.baseline,
        "finalists": [_finalist_json(finalist) for finalist in fitted.finalists],
    }


def _finalist_json(finalist: Finalist) -> dict[str, Any]:
    return {
        "origin": finalist.origin,
        "trained": finalist.scheme.describe(),
        "predicted": finalist.predicted,
        "measured": finalist.measured,
        "draws": len(finalist.accuracies),
        "ram_bytes": finalist.ram_bytes,
        "backward_macs": finalist.backward_macs,
    }


def _show_fitted(fitted: FittedModel) -> None:
    """Print the contributions, the knapsack's answer, the measured candidates, and what is trained."""
    print("\n".join(fitted.table.lines()))
    print(f"knapsack: {fitted.optimum.describe()}")
    table = Table(box=None, pad_edge=False)
    for name in ("found by", "trainings", "predicted, %", "measured, %", "RAM, B"):
        table.add_column(name, justify="left" if name == "found by" else "right")
    for f in fitted.finalists:
        measured = f"{100 * f.measured:.1f}"
        table.add_row(f.origin, str(len(f.accuracies)), f"{100 * f.predicted:.1f}", measured, f"{f.ram_bytes:,}")
    terminal().print(table)
    best = fitted.best
    print(f"trained: {best.scheme.describe()}")
    print(
        f"predicted {100 * best.predicted:.1f} %, measured {100 * best.measured:.1f} %; {best.ram_bytes:,} B of RAM, "
        f"{best.backward_macs:,} backward MAC"
    )


def _valuation_json(found: Valuation) -> dict[str, Any]:
    """Return what `mcu compile --per-joule` measured and chose, as JSON; joules are estimates for the whole job."""
    return {
        "chosen": found.chosen.origin,
        "trained": found.chosen.scheme.describe(),
        "untrained": found.chosen.untrained,
        "candidates": [
            {
                "origin": valued.origin,
                "accuracy": valued.accuracy,
                "behind": valued.behind(found.best)[0],
                "behind_error": valued.behind(found.best)[1],
                "job_joules": valued.job_joules,
                "gain_per_joule": valued.gain_per_joule,
                **_held_json(valued.fitted),
            }
            for valued in found.valued
        ],
        "refused": [{"origin": refused.origin, "reason": refused.reason} for refused in found.refused],
    }


def _show_valuation(found: Valuation) -> None:
    """Print the result and cost of each candidate, which one was chosen, and by which rule."""
    table = Table(box=None, pad_edge=False)
    for name in ("trained", "%", "behind", "job", "each", "RAM, B", "paged", "%/J"):
        table.add_column(name, justify="left" if name == "trained" else "right", no_wrap=True)
    for valued in found.valued:
        behind, error = valued.behind(found.best)
        medium = valued.fitted.memory.medium
        table.add_row(
            valued.origin,
            f"{100 * valued.accuracy:.1f}",
            f"{100 * behind:.1f} ± {100 * error:.1f}",
            format_joules(valued.job_joules),
            format_seconds(valued.fitted.seconds),
            f"{valued.fitted.memory.ram_bytes:,}",
            f"{0 if medium is None else medium.size_bytes:,}",
            f"{100 * valued.gain_per_joule:.3g}",
        )
    terminal().print(table)
    for refused in found.refused:
        print(f"{refused.origin}: {refused.reason}")
    print(
        f"chosen: {found.chosen.origin}, {found.chosen.scheme.describe()}; untrained "
        f"{100 * found.chosen.untrained:.1f} %. The rule: within one standard error of the best, most points gained "
        "per joule (estimated)"
    )


def _held_json(held: FittedMemory) -> dict[str, Any]:
    """Return the cost of a plan within a budget, as JSON; seconds and joules are estimates for one training sample."""
    medium = held.memory.medium
    return {
        "ram_bytes": held.memory.ram_bytes,
        "recomputed": held.memory.recomputed,
        "paged": held.memory.paged,
        "medium": None if medium is None else medium.name,
        "medium_bytes": 0 if medium is None else medium.size_bytes,
        "written_bytes": 0 if medium is None else medium.written_bytes,
        "banded": sum(row.part for row in held.memory.rows),
        "seconds": held.seconds,
        "joules": held.joules,
        "overhead": held.overhead,
    }


def _show_held(held: FittedMemory) -> None:
    """Print the cost of a plan within a budget."""
    again, paged = held.memory.recomputed, held.memory.paged
    tiles = sum(row.part for row in held.memory.rows)
    how = "everything is kept"
    if again or tiles or paged:
        pages = f", {paged} pages read" if paged else ""
        how = f"{again} rows recomputed, {tiles} in tiles{pages}, {held.overhead:.1%} more energy"
    print(
        f"{held.memory.ram_bytes:,} B: {how}; {format_seconds(held.seconds)} and {format_joules(held.joules)} per "
        "sample (estimated)"
    )
    medium = held.memory.medium
    if medium is None:
        return
    home = ", including two copies of the trained parameters" if held.memory.parameters.pages else ""
    line = f"{medium.name}: {medium.size_bytes:,} B{home}; {medium.written_bytes:,} B written per sample"
    if held.page_costs is not None and held.page_costs.endurance_cycles is not None:
        line += f", to the same blocks, which last about {held.page_costs.endurance_cycles:,.0f} samples"
    print(line)
