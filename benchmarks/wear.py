"""How much plans write to flash, with and without a price for its wear: `python -m benchmarks.wear [CASE ...]`.

Training steps on a board (estimated costs) at shares of the memory that they take when everything is kept (tensors
only). Each is planned twice, as if writing wore nothing and with the price of its medium; the table has bytes written
per step, seconds and joules of both, and after how many steps the medium is worn out. A card of 32 GB is assumed to
take 19.2 TB. As in `port-agent plan`, chains of operators run in tiles where a quick plan costs less so; that the
board's kernels give the bits of the whole is assumed here and compared there.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.models import CASES, DEMO, DEMO_SCRIPT, Workload, make_optimizer, workload
from port_agent.energy.media import FlashPrices, medium_of
from port_agent.prepare.making.device_costs import on_medium
from port_agent.prepare.tiling.choice import QUICK_S
from port_planner.base.units import format_bytes, format_seconds
from port_planner.capture.step import capture_step
from port_planner.ir.boards import estimated_costs, load_board
from port_planner.ir.costs import CostTable, DeviceCosts, MediumKind
from port_planner.ir.graph import StepGraph
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Plan
from port_planner.ir.program import Program
from port_planner.job_sources import load_job
from port_planner.search.plan_step import plan_step
from port_planner.search.wear import with_wear
from port_planner.tiling.tilings import first_tilings, tile_fat

LORA = "gpt2-lora"
CASES_WORN = (DEMO, "resnet18", "resnet50", "gpt2", "bert", LORA)
PERCENT = (30, 50, 70)


@dataclass(frozen=True, slots=True)
class PlanningReport:
    """What one plan takes per step."""

    written_bytes: int
    seconds: float
    joules: float


@dataclass(frozen=True, slots=True)
class Row:
    """One step within one budget; None where there is no plan."""

    case: str
    percent: int
    unpriced: PlanningReport | None
    priced: PlanningReport | None
    lasts_steps: float | None
    """The number of steps of the priced plan after which the medium is worn out."""


def capture(case: str) -> StepGraph:
    """Return the training step of a case: the demo's own, a model with its usual optimizer, or
    adapters of rank 8 on GPT-2.
    """
    if case == DEMO:
        job = load_job(DEMO_SCRIPT)
        rows = tuple(column[: job.batch_size] for column in job.data)
        return capture_step(job.model, job.loss_fn, job.optimizer, rows).graphs["step"]
    if case == LORA:
        made, optimizer = adapted(workload("gpt2")), "adamw"
    else:
        made, optimizer = workload(case), CASES[case][0]
    trained = [p for p in made.model.parameters() if p.requires_grad]
    return capture_step(made.model, made.loss_fn, make_optimizer(optimizer, trained), made.batch(0)).graphs["step"]


def adapted(made: Workload) -> Workload:
    """Return a workload whose model is frozen except for adapters that peft added."""
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(
        LoraConfig(r=8, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True), made.model
    )
    return made


def rows_of(case: str, board: str, medium: MediumKind, time_limit_s: float) -> Iterator[Row]:
    """Yield a row per budget."""
    graph, on_board = capture(case), load_board(board)
    worn = on_medium(estimated_costs(graph, on_board).device, medium_of(medium, FlashPrices()))
    base, endurance = worn.base_bytes, worn.flash.endurance_bytes

    def program_of(
        step: StepGraph, device: DeviceCosts, ram_bytes: int, limit_s: float, strategy: str
    ) -> Program | None:
        costs = CostTable(device, estimated_costs(step, on_board).ops)
        plan = plan_step(step, costs, ram_bytes=ram_bytes, time_limit_s=limit_s, strategy=strategy).plan
        return None if plan is None else lower(step, costs, plan)

    def planned(device: DeviceCosts, ram_bytes: int) -> PlanningReport | None:
        cut = [tile_fat(graph, *way).applied(graph).graph for way in first_tilings(graph, ram_bytes - base)]
        quick = [(step, program_of(step, device, ram_bytes, QUICK_S, "greedy")) for step in (graph, *cut)]
        cheapest = min((p.cost_joules, k) for k, (_, p) in enumerate(quick) if p is not None)[1]
        program = program_of(quick[cheapest][0], device, ram_bytes, time_limit_s, "milp")
        return None if program is None else PlanningReport(program.written_bytes, program.seconds, program.joules)

    whole = lower(graph, CostTable(worn, estimated_costs(graph, on_board).ops), Plan()).peak_bytes - base
    for percent in PERCENT:
        ram_bytes = base + whole * percent // 100
        unpriced, priced = (planned(device, ram_bytes) for device in (with_wear(worn, 0.0), worn))
        written = priced.written_bytes if priced else 0
        yield Row(case, percent, unpriced, priced, endurance / written if endurance and written else None)


def show(rows: Sequence[Row], title: str, console: Console) -> None:
    """Print a line per case and budget."""
    table = Table(
        "step", "budget", "written", "priced", "share", "time", "priced", "joules", "priced", "lasts", title=title
    )
    for row in rows:
        if row.unpriced is None or row.priced is None:
            table.add_row(row.case, f"{row.percent} %", "no plan" if row.unpriced is None else "", "no plan")
            continue
        before, after = row.unpriced, row.priced
        share = after.written_bytes / before.written_bytes if before.written_bytes else 0.0
        table.add_row(
            row.case,
            f"{row.percent} %",
            format_bytes(before.written_bytes),
            format_bytes(after.written_bytes),
            f"{share:.0%}",
            format_seconds(before.seconds),
            f"{after.seconds / before.seconds:.2f}x",
            f"{before.joules:.1f}",
            f"{after.joules / before.joules:.2f}x",
            "forever" if row.lasts_steps is None else f"{row.lasts_steps:,.3g} steps",
        )
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="benchmarks.wear", description=__doc__.partition("\n\n")[0])
    parser.add_argument("cases", nargs="*", default=CASES_WORN, metavar="CASE", help=", ".join(CASES_WORN))
    parser.add_argument("--board", default="pi4b")
    parser.add_argument("--medium", choices=[kind.name.lower() for kind in MediumKind], default="sd")
    parser.add_argument("--time-limit", type=float, default=20.0, metavar="S", help="CPU seconds per plan")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    medium = MediumKind[options.medium.upper()]
    rows = []
    for case in options.cases:
        rows += list(rows_of(case, options.board, medium, options.time_limit))
        print(f"{case}: planned", file=sys.stderr)
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        show(rows, f"flash written per step on {options.board} (estimated), {medium.value}", Console(width=130))
    return 0


if __name__ == "__main__":
    sys.exit(main())
