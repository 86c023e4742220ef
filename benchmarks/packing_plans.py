"""Plans with packing compared with plans without, for shares of what a step takes with everything kept,
besides the worker itself.

    python -m benchmarks.packing_plans [resnet18 resnet50 vgg16bn mobilenetv2 gpt2 demo] [--batch 16]
        [--card] [--strategy greedy] [--time-limit 20] [--json]

Nets for images see CIFAR-10; what packing takes is measured on them in a trial. Joules, seconds and written bytes are
the planner's, of a step among others like it; joules are those that wear is charged with, too. "none": no plan fits. A
net whose activations are not sparse (GPT-2's GELU) gains almost nothing. Exits with 1 where a plan with packing takes
more joules, seconds or written bytes than the one without, or where there is none. On a card, plans that write less may
take a quarter more time, with packing as without.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.models import case_of
from benchmarks.ours import Ours
from benchmarks.packing_footprint import on_images, written
from port_agent.prepare.making.device_costs import slower_flash
from port_agent.prepare.measurement.dry_run import DryRunWorkers
from port_planner.ir.costs import CostTable
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Action, Plan
from port_planner.search.plan_step import PlanResult, plan_step
from port_planner.search.wear import SPARING_TIME

SHARES = (0.3, 0.5, 0.7)
CARD_READ, CARD_WRITE = 45e6, 25e6
CARD_WEAR_JOULES_PER_BYTE = 5e-6
"""Derived from a card's price and life, as in FORMULATION.md."""
IMAGES = ("resnet18", "resnet50", "vgg16bn", "mobilenetv2")
MODELS = (*IMAGES, "gpt2", "demo")
_ROUNDING = 1e-9
"""Relative, for sums in another order."""


@dataclass(frozen=True, slots=True)
class Row:
    """One model in one budget; of each pair, the first is without packing. None: no plan fits."""

    model: str
    share: float
    ram_bytes: int
    joules: tuple[float | None, float | None]
    seconds: tuple[float | None, float | None]
    written_bytes: tuple[int | None, int | None]
    packed: int
    packed_and_paged: int
    on_card: bool = False

    @property
    def costlier(self) -> tuple[str, ...]:
        """What the plan with packing takes more of than the plan without."""
        bare, packed = self.written_bytes
        slower = SPARING_TIME if self.on_card and _more(packed, bare) else 1.0
        pairs = {
            "joules": (self.joules, 1.0),
            "seconds": (self.seconds, slower),
            "written bytes": (self.written_bytes, 1.0),
        }
        return tuple(what for what, (pair, factor) in pairs.items() if _more(*pair, factor))


def _more(bare: float | None, packed: float | None, factor: float = 1.0) -> bool:
    return bare is not None and (packed is None or packed > bare * factor * (1 + _ROUNDING))


def main() -> None:
    """Run the benchmark and print a line for each row, or JSON; exit with 1 where packing makes a plan costlier."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("models", nargs="*", default=list(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--strategy", default="greedy")
    parser.add_argument("--time-limit", type=float, default=20.0, help="CPU seconds of each plan")
    parser.add_argument("--card", action="store_true", help="plan for an SD card in place of this machine's flash")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of lines")
    arguments = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for model in arguments.models:
            made = measure(model, Path(folder), arguments)
            rows += made
            if not arguments.json:
                print("\n".join(line(row) for row in made), flush=True)
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
    costlier = [
        f"{row.model} at {row.share:.0%}: more {', '.join(row.costlier)} with packing" for row in rows if row.costlier
    ]
    if costlier:
        sys.exit("\n".join(costlier))


def measure(model: str, folder: Path, arguments: argparse.Namespace) -> list[Row]:
    """Return the rows of one model."""
    images = model in IMAGES
    ours = on_images(model, folder, arguments.batch, 2) if images else Ours(model, folder, *case_of(model), steps=2)
    graph = ours.captured.graphs["step"]
    without = CostTable(ours.device, ours.measured.ops[0])
    found = DryRunWorkers(1).dry_run(
        written(ours, folder / "kept.port", without, Plan()), (folder,), probe_packing=True
    )
    watts = ours.device.compute_watts
    if arguments.card:
        card = slower_flash(ours.device, CARD_READ, CARD_WRITE)
        flash = replace(card.flash, wear_joules_per_byte=CARD_WEAR_JOULES_PER_BYTE)
        without = replace(without, device=replace(card, flash=flash))
    packings = tuple(replace(cost, joules=cost.seconds * watts) for cost in found.packings.get("step", ()))
    base = ours.device.base_bytes
    kept = lower(graph, without, Plan()).peak_bytes - base
    rows = []
    for share in SHARES:
        ram = base + int(share * kept)
        bare, packed = (
            plan_step(graph, costs, ram_bytes=ram, strategy=arguments.strategy, time_limit_s=arguments.time_limit)
            for costs in (without, replace(without, packings=packings))
        )
        costs = replace(without, packings=packings)
        figures = [_figures(ours, without, bare), _figures(ours, costs, packed)]
        decided = [d.action for d in packed.plan.decisions] if packed.plan is not None else []
        joules, seconds, moved = zip(*figures, strict=True)
        packs, packs_pages = (decided.count(action) for action in (Action.PACK, Action.PACK_PAGE))
        rows.append(Row(model, share, ram, joules, seconds, moved, packs, packs_pages, arguments.card))
    return rows


def _figures(ours: Ours, costs: CostTable, found: PlanResult) -> tuple[float | None, float | None, int | None]:
    if found.plan is None:
        return None, None, None
    program = lower(ours.captured.graphs["step"], costs, found.plan)
    return program.cost_joules, program.seconds, program.written_bytes


def line(row: Row) -> str:
    """Return a row for people."""

    def pair(values: tuple[float | None, float | None], unit: float, digits: int) -> str:
        return " -> ".join("none" if v is None else f"{v / unit:.{digits}f}" for v in values)

    return (
        f"{row.model} at {row.share:.0%} ({row.ram_bytes / 2**20:.0f} MiB): {pair(row.joules, 1, 3)} J, "
        f"{pair(row.seconds, 1, 3)} s, {pair(row.written_bytes, 2**20, 1)} MiB written; {row.packed} packed, "
        f"{row.packed_and_paged} packed and paged"
    )


if __name__ == "__main__":
    main()
