"""The kernel's swap compared with `exec` and bundles, at the same limit:
`python -m benchmarks.swap [MODEL=MIB ...]`.

The same unchanged script (`benchmarks.loop`) in a memory cgroup of that size: with a swap file, with zram where there
is one, and through `port-agent exec` without swap; and the planned bundle. The kernel enforces the limit, everything of
the process included. Seconds are medians of the steps after the first; bytes written are those of the whole run, per
step. It needs root; if it cannot run, it says why.
"""

import argparse
import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import memory_group
from benchmarks.fit import run_follow
from benchmarks.models import CASES
from benchmarks.tables import table_console

STEPS = 4
LIMITS_MIB = {"gpt2": 970, "resnet50": 400, "bert": 900}
BESIDE_GROUP_MIB = 16
"""What the kernel charges to a group besides resident memory: page tables, and pages of files that pass through."""
SHARES = (1.0, 0.95, 0.9, 0.85)
"""Of the limit, less that: single operators may need more than the budget, and the kernel kills without asking."""
SWAP_BYTES = 6 << 30
TIMEOUT_S = 900


@dataclass
class Row:
    """One way to train one model inside one limit; None: it was killed, or took longer than TIMEOUT_S."""

    model: str
    limit_mib: int | None
    way: str
    wall_s: float | None = None
    cpu_s: float | None = None
    first_wall_s: float | None = None
    written_mib: float | None = None
    """MiB written per step."""
    equal: bool | None = None


def main() -> int:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = " ".join(f"{model}={mib}" for model, mib in LIMITS_MIB.items())
    parser.add_argument("cases", nargs="*", default=known.split(), help=f"model and limit in MiB (default: {known})")
    parser.add_argument("--no-bundle", action="store_true", help="leave out the bundle, which takes minutes to plan")
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="a disk for swap file and pages")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    reason = memory_group.obstacle()
    if reason:
        print(f"skipped: {reason}")
        return 0
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="port-swap-", dir=arguments.folder) as folder:
        for case in arguments.cases:
            model, _, mib = case.partition("=")
            rows += measure(model, int(mib), Path(folder), bundle=not arguments.no_bundle)
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
        return 0
    _print(rows)
    return 0


def measure(model: str, limit_mib: int, folder: Path, *, bundle: bool) -> list[Row]:
    """Return a row for each way."""
    reference = run_loop(model)
    if reference is None:
        raise SystemExit(f"plain PyTorch does not train {model} here")
    rows = [_row(model, None, "plain, no limit", reference, 0.0, reference)]
    ways: list[tuple[str, contextlib.AbstractContextManager[None]]] = [
        ("swap file", memory_group.swap_file(folder, SWAP_BYTES))
    ]
    if not memory_group.zram_obstacle():
        ways.append(("zram", memory_group.zram(SWAP_BYTES)))
    for way, swapping in ways:
        with swapping, _group(limit_mib) as enter:
            before = memory_group.swapped_bytes()[1]
            result = run_loop(model, enter)
            written = (memory_group.swapped_bytes()[1] - before) / 2**20
        rows.append(_row(model, limit_mib, way, result, written, reference))
        print(rows[-1], file=sys.stderr)
    rows.append(_follow(model, limit_mib, folder, reference))
    print(rows[-1], file=sys.stderr)
    if bundle:
        rows.append(_bundle(model, limit_mib, folder, reference))
    return rows


def _follow(model: str, limit_mib: int, folder: Path, reference: dict[str, Any]) -> Row:
    """Run the script with `exec`, under the largest budget of SHARES with which the kernel lets it finish."""
    for share in SHARES:
        ram_mib = int((limit_mib - BESIDE_GROUP_MIB) * share)
        with _group(limit_mib) as enter:
            move_in = functools.partial(_move_in, enter)
            result = run_follow(model, None, steps=STEPS, ram_mib=ram_mib, page_dir=folder, enter=move_in)
        if result is not None:
            written = result["report"]["written_bytes"] / 2**20
            return _row(model, limit_mib, f"follow --ram {ram_mib}M", result, written, reference)
    return Row(model, limit_mib, "follow")


def _move_in(enter: Callable[[int], None]) -> None:
    enter(os.getpid())


@contextlib.contextmanager
def _group(limit_mib: int) -> Iterator[Callable[[int], None]]:
    with memory_group.memory_group(limit_mib << 20) as enter:
        yield enter


def run_loop(model: str, enter: Callable[[int], None] | None = None) -> dict[str, Any] | None:
    """Run the script with plain Python; None if it is killed or takes too long."""
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.loop", model, str(STEPS)],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=TIMEOUT_S,
            preexec_fn=functools.partial(_move_in, enter) if enter else None,
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode != 0:
        return None
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**result, "cpu_s": result["cpu_s"][1:]}


def _bundle(model: str, limit_mib: int, folder: Path, reference: dict[str, Any]) -> Row:
    from benchmarks.ours import Ours

    ours = Ours(model, folder, *CASES[model], steps=STEPS)
    path = ours.plan((limit_mib - BESIDE_GROUP_MIB) << 20, strategy="milp")
    if path is None:
        return Row(model, limit_mib, "bundle")
    with _group(limit_mib) as enter:
        run = ours.train(path, enter=enter)
    if run is None:
        return Row(model, limit_mib, "bundle")
    written = sum(step["paged_out_bytes"] for step in run.steps) / 2**20
    result = {
        "losses": [step["loss"].hex() for step in run.steps],
        "cpu_s": [step["cpu_s"] for step in run.steps[1:]],
        "wall_s": [step["wall_s"] for step in run.steps],
    }
    return _row(model, limit_mib, "bundle", result, written, reference)


def _row(
    model: str,
    limit_mib: int | None,
    way: str,
    result: dict[str, Any] | None,
    written_mib: float,
    reference: dict[str, Any],
) -> Row:
    if result is None:
        return Row(model, limit_mib, way)
    return Row(
        model,
        limit_mib,
        way,
        statistics.median(result["wall_s"][1:]),
        statistics.median(result["cpu_s"]),
        result["wall_s"][0],
        written_mib / STEPS,
        result["losses"] == reference["losses"],
    )


def _print(rows: list[Row]) -> None:
    table = Table(title="one step inside a memory cgroup, the same script")
    for column in (
        "model",
        "limit MiB",
        "way",
        "wall s",
        "CPU s",
        "first step s",
        "written MiB",
        "losses equal plain's",
    ):
        table.add_column(column, justify="left" if column in ("model", "way") else "right")
    for row in rows:
        figures = (row.wall_s, row.cpu_s, row.first_wall_s, row.written_mib)
        table.add_row(
            row.model,
            str(row.limit_mib or ""),
            row.way,
            *(f"{v:.2f}" if v is not None else "-" for v in figures),
            {True: "yes", False: "NO", None: "does not finish"}[row.equal],
        )
    table_console(110).print(table)


if __name__ == "__main__":
    sys.exit(main())
