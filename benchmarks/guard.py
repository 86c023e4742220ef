"""What guarded memory costs, with operators intercepted and alone: `python -m benchmarks.guard [MODEL=MIB ...]`.

The same unchanged script (`benchmarks.loop`), plain and through `port-agent exec --ram`: with operators intercepted,
without recomputation (`--no-recompute`), and with `--guard-only`, where the processor's protection alone decides.
Seconds are medians of the steps after the first; bytes and faults are of the whole run.
"""

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from rich.table import Table

from benchmarks.fit import run_child, run_follow
from benchmarks.tables import table_console

STEPS = 6
BUDGETS_MIB = {"gpt2": 1240, "bert": 700, "resnet50": 400}


@dataclass(frozen=True)
class Row:
    """One way to run one model. `equal`: its losses are plain PyTorch's, to the bit; None of plain itself."""

    model: str
    ram_mib: int
    way: str
    wall_s: float
    cpu_s: float
    peak_mib: float
    read_mib: float = 0.0
    written_mib: float = 0.0
    read_faults: int = 0
    write_faults: int = 0
    fault_s: float = 0.0
    equal: bool | None = None


def main() -> int:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [f"{model}={mib}" for model, mib in BUDGETS_MIB.items()]
    parser.add_argument("cases", nargs="*", default=known, help=f"model and budget in MiB (default: {' '.join(known)})")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for case in arguments.cases:
        model, _, mib = case.partition("=")
        rows += measure(model, int(mib), arguments.steps)
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
        return 0
    table = Table(title="guarded memory, one thread of compute")
    for field in fields(Row):
        table.add_column(field.name.replace("_", " "), justify="left" if field.name in ("model", "way") else "right")
    for row in rows:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in asdict(row).values()))
    table_console(160).print(table)
    return 0


def measure(model: str, ram_mib: int, steps: int) -> list[Row]:
    """Return a row for each way. Raises SystemExit if one does not finish."""
    plain = run_child("eager", model, None, steps=steps, thrifty=False)
    if plain is None:
        raise SystemExit(f"{model} does not run without a budget")
    rows = [_row(model, ram_mib, "plain", plain, None)]
    ways: tuple[tuple[str, Literal["no-recompute", "guard-only"] | None], ...]
    ways = (("intercepted", None), ("nothing recomputed", "no-recompute"), ("guard alone", "guard-only"))
    for way, advice in ways:
        print(f"{model}, {way} ...", file=sys.stderr)
        run = run_follow(model, None, steps=steps, ram_mib=ram_mib, advice=advice)
        if run is None:
            raise SystemExit(f"{model} does not finish in {ram_mib} MiB, {way}")
        rows.append(_row(model, ram_mib, way, run, plain))
    return rows


def _row(model: str, ram_mib: int, way: str, run: dict[str, Any], plain: dict[str, Any] | None) -> Row:
    cpu_s = statistics.median(run["cpu_s"])
    if plain is None:
        return Row(model, ram_mib, way, statistics.median(run["wall_s"]), cpu_s, run["peak_mib"])
    wall_s = statistics.median(run["wall_s"][1:])
    report = run["report"]
    faults = report.get("faults") or {"read_faults": 0, "write_faults": 0, "fault_ns": 0}
    return Row(
        model,
        ram_mib,
        way,
        wall_s,
        cpu_s,
        run["peak_mib"],
        report["read_bytes"] / 2**20,
        report["written_bytes"] / 2**20,
        faults["read_faults"],
        faults["write_faults"],
        faults["fault_ns"] / 1e9,
        run["losses"] == plain["losses"],
    )


if __name__ == "__main__":
    sys.exit(main())
