"""What packed pages gain: seconds of a step and bytes moved, with and without packing.

    python -m benchmarks.page_packing [gpt2] [--mib 700] [--steps 2] [--read 45e6] [--write 25e6] [--json]

Each model is planned for the same budget twice, under costs of the throttled medium, and trained in a separate worker
whose page thread is held to that medium's speed; both must end with the same state to the bit. "share" is what a page
of the model's own weights takes packed. Steps after the first count.
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.models import CASES
from benchmarks.ours import Ours
from port_agent.prepare.making.device_costs import slower_flash
from port_agent.prepare.making.packed_pages import with_packed_pages
from port_planner import make_bundle


@dataclass(frozen=True, slots=True)
class Row:
    """One model and budget; of each pair, the first is without packing."""

    model: str
    budget_mib: int
    read_bytes_per_s: float
    write_bytes_per_s: float
    packs: bool
    """Whether the plan packs pages at this medium's speed."""
    planned_s: tuple[float, float]
    step_s: tuple[float, float]
    moved_bytes: tuple[int, int]
    ratio: float
    equal: bool


def main() -> None:
    """Run the benchmark and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("models", nargs="*", default=["gpt2"], help=f"of {', '.join(CASES)}")
    parser.add_argument("--mib", type=int, default=700, help="budget, the worker's own memory included")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--read", type=float, default=45e6, help="bytes per second")
    parser.add_argument("--write", type=float, default=25e6, help="bytes per second")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="port-pages-") as folder:
        limits = arguments.read, arguments.write
        rows = [measure(m, Path(folder), arguments.mib, limits, arguments.steps) for m in arguments.models]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    for row in rows:
        print(
            f"{row.model} in {row.budget_mib} MiB at "
            f"{row.read_bytes_per_s / 1e6:.0f}/{row.write_bytes_per_s / 1e6:.0f} MB/s: {row.step_s[0]:.1f} s a step, "
            f"{row.step_s[1]:.1f} s with packed pages ({row.ratio:.2f}x, planned "
            f"{row.planned_s[1] / row.planned_s[0]:.2f}x); {row.moved_bytes[0] / 1e6:.0f} MB moved, then "
            f"{row.moved_bytes[1] / 1e6:.0f} MB; {'equal to the bit' if row.equal else 'NOT EQUAL'}"
        )


def measure(model: str, folder: Path, mib: int, limits: tuple[float, float], steps: int) -> Row:
    """Return the row of one model."""
    optimizer, batch = CASES[model]
    ours = Ours(model, folder, optimizer, batch, steps=steps)
    plain = slower_flash(ours.device, *limits)
    packed = with_packed_pages(plain, ours.captured.initial_tensors)
    planner = make_bundle.default_planner(strategy="greedy", time_limit_s=20.0)
    planned, runs = [], []
    for number, device in enumerate((plain, packed)):
        plans, costs = make_bundle.plan_all(ours.captured, ours.measured, device, mib << 20, planner)
        path = folder / f"{model}-{number}.port"
        make_bundle.write(path, ours.captured, [plans], costs, [mib << 20], threads=1)
        run = ours.train(path, limits=limits)
        if run is None:
            raise SystemExit(f"{model}: a run failed")
        planned.append(plans["step"].seconds)
        runs.append(run)
    step_s = [statistics.mean(step["wall_s"] for step in run.steps[1:]) for run in runs]
    moved = [run.steps[-1]["paged_in_bytes"] + run.steps[-1]["paged_out_bytes"] for run in runs]
    return Row(
        model, mib, *limits, packed.flash.packs_pages, (planned[0], planned[1]), (step_s[0], step_s[1]), (moved[0], moved[1]),
        step_s[1] / step_s[0], runs[0].digest == runs[1].digest,
    )  # fmt: skip


if __name__ == "__main__":
    main()
