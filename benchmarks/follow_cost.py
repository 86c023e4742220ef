"""What running an unchanged script under `exec` costs: `python -m benchmarks.follow_cost [MODEL...]`.

`benchmarks.loop`, plain and through `port-agent exec`, under four budgets: ample (nothing moves), twice the floor
(the goal of `benchmarks.fit`), the bundles' limit, and that limit with pages as slow as an SD card (45 MB/s read, 25
MB/s written), there alongside the bundle itself. CPU and wall seconds of the first step, and medians of the later
ones; plain runs and runs under `exec` take turns, and the smaller median of each counts. Where tensors moved, the
first run is long enough to be planned and every later one begins with its plan: `cpu s` is of the steps before that,
`planned` of those with it, `planned after` the seconds from the start of the first run until its plan was in force
(on a new cache). `checksum share`: CPU seconds for checksums of the pages of a step, at the speed measured alongside
it, in what a step takes.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash
from rich.table import Table

from benchmarks.fit import FOLLOW_TARGETS_MIB, TARGETS_MIB, run_child, run_follow
from benchmarks.models import CASES
from benchmarks.tables import table_console
from port_agent.paging.pager import CHUNK

STEPS = 6
BEFORE_PLAN = 3
"""Steps after the first that no plan of the same run decides: a step is recorded when it came twice, and
then a plan is searched for.
"""
PLANNED_STEPS = 14
"""Steps of the run whose plan is kept."""
TURNS = 2
AMPLE_MIB = 6000
SD_CARD = (45_000_000, 25_000_000)
"""Bytes per second, read and written."""
CHECKED_BYTES = 512 << 20


@dataclass
class Row:
    """One model under one budget. Bytes are per step, `equal`: the losses are plain's, to the bit."""

    model: str
    budget: str
    ram_mib: int
    peak_mib: int
    plain_cpu_s: float
    first_cpu_s: float
    cpu_s: float
    ratio: float
    planned_cpu_s: float | None
    planned_ratio: float | None
    plan: str | None
    planned_after_s: float | None
    checksum_share: float
    first_wall_s: float
    wall_s: float
    planned_wall_s: float | None
    read_mib: float
    written_mib: float
    recomputed_mib: float
    stall_s: float
    bundle_wall_s: float | None
    equal: bool


def main() -> int:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--no-bundle", action="store_true", help="leave out the bundle, which takes minutes to plan")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for model in arguments.models or CASES:
        print(f"{model} ...", file=sys.stderr)
        rows += measure(model, bundle=not arguments.no_bundle)
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
        return 0
    names = list(Row.__dataclass_fields__)
    table = Table(title="an unchanged script under exec, one thread of compute")
    for name in names:
        table.add_column(name.replace("_", " "), justify="left" if name in ("model", "budget") else "right")
    for row in rows:
        table.add_row(*(_text(getattr(row, name)) for name in names))
    table_console(180).print(table)
    return 0


def measure(model: str, *, bundle: bool) -> list[Row]:
    """Return a row per budget."""
    target = TARGETS_MIB[model]
    budgets: tuple[tuple[str, int, tuple[int, int] | None], ...] = (
        ("ample", AMPLE_MIB, None),
        ("twice floor", 2 * FOLLOW_TARGETS_MIB[model], None),
        ("target", target, None),
        ("target, SD card", target, SD_CARD),
    )
    rows = []
    for name, ram_mib, rates in budgets:
        with tempfile.TemporaryDirectory(prefix="port-follow-plans-") as plans:
            first = _pair(model, ram_mib, rates, PLANNED_STEPS, Path(plans))
            moved = first[1]["report"]["read_bytes"] > 0
            pairs = [first, *(_pair(model, ram_mib, rates, STEPS, Path(plans)) for _ in range(TURNS if moved else 1))]
        beside = _bundle_wall_s(model, ram_mib, rates) if rates and bundle else None
        rows.append(_row(model, name, ram_mib, pairs, beside))
        print(rows[-1], file=sys.stderr)
    return rows


def _pair(
    model: str, ram_mib: int, rates: tuple[int, int] | None, steps: int, plans: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    plain = run_child("eager", model, None, steps=steps, thrifty=False)
    run = run_follow(model, None, steps=steps, ram_mib=ram_mib, rates=rates, plans=plans)
    if plain is None or run is None:
        raise SystemExit(f"{model} does not finish in {ram_mib} MiB")
    return plain, run


def _row(
    model: str,
    budget: str,
    ram_mib: int,
    pairs: list[tuple[dict[str, Any], dict[str, Any]]],
    bundle_wall_s: float | None,
) -> Row:
    plain_cpu_s = min(statistics.median(plain["cpu_s"]) for plain, _ in pairs)
    run = pairs[0][1]
    cpu_s = statistics.median(run["cpu_s"][:BEFORE_PLAN])
    planned = [run for _, run in pairs[1:] if run["report"]["plan"] is not None]
    last = planned[-1] if planned else run
    planned_cpu_s = min((statistics.median(run["cpu_s"][-BEFORE_PLAN:]) for run in planned), default=None)
    planned_wall_s = min((statistics.median(run["wall_s"][-BEFORE_PLAN:]) for run in planned), default=None)
    report, steps = last["report"], len(last["losses"])
    read, written, recomputed = (report[f"{what}_bytes"] / steps / 2**20 for what in ("read", "written", "recomputed"))
    checked_s = (report["read_bytes"] + report["written_bytes"]) / steps / _checksum_bytes_per_s()
    return Row(
        model, budget, ram_mib, run["peak_mib"], plain_cpu_s, run["first_cpu_s"], cpu_s, cpu_s / plain_cpu_s,
        planned_cpu_s, planned_cpu_s and planned_cpu_s / plain_cpu_s, report["plan"], run["report"]["planned_after_seconds"],
        checked_s / statistics.median(last["cpu_s"]), run["wall_s"][0],
        statistics.median(run["wall_s"][1 : BEFORE_PLAN + 1]), planned_wall_s, read, written, recomputed, report["stall_seconds"] / steps,
        bundle_wall_s, all(run["losses"] == plain["losses"] for plain, run in pairs),
    )  # fmt: skip


def _checksum_bytes_per_s() -> float:
    """Return how fast the page thread's checksum is here, on memory that no cache holds."""
    memory = memoryview(bytearray(CHECKED_BYTES))
    begin_s = time.process_time()
    for start in range(0, CHECKED_BYTES, CHUNK):
        xxhash.xxh3_64_intdigest(memory[start : start + CHUNK])
    return CHECKED_BYTES / (time.process_time() - begin_s)


def _bundle_wall_s(model: str, ram_mib: int, rates: tuple[int, int] | None) -> float | None:
    """Return the wall seconds of a step of the bundle planned for this budget and medium."""
    from benchmarks.ours import Ours

    with tempfile.TemporaryDirectory(prefix="port-follow-cost-", dir="/var/tmp") as folder:
        ours = Ours(model, Path(folder), *CASES[model], steps=STEPS)
        path = ours.plan(ram_mib << 20, strategy="milp", limits=rates)
        run = ours.train(path, limits=rates) if path else None
    return statistics.median(step["wall_s"] for step in run.steps[1:]) if run else None


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.2f}" if isinstance(value, float) else str(value if value is not None else "")


if __name__ == "__main__":
    sys.exit(main())
