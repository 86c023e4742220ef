"""LoRA on a frozen model of 1.1 billion weights, inside a budget: `python -m benchmarks.lora [MIB ...]`.

A TinyLlama-1.1B with random bfloat16 weights is written to safetensors once (2.2 GB, below --folder). The unchanged
script `benchmarks.lora_loop` loads it and trains its adapters on sequences of 128 tokens: plain, and through
`port-agent exec` under each budget. Seconds are medians of the steps after the first, bytes are per step.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.llm import SHAPES
from benchmarks.tables import table_console

STEPS = 4
BUDGETS_MIB = (450, 525, 600)
TIMEOUT_S = 1800
TINYLLAMA, QWEN = "tinyllama-1.1b", "qwen2.5-0.5b"
"""Shapes of models."""


@dataclass(frozen=True)
class Row:
    """One run. Bytes read, written, mapped from the weights' file and recomputed are per step."""

    ram_mib: int | None
    peak_mib: int
    cpu_s: float
    wall_s: float
    first_wall_s: float
    read_mib: float
    written_mib: float
    mapped_mib: float
    recomputed_mib: float
    equal: bool


def main() -> int:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("budgets", nargs="*", type=int, default=BUDGETS_MIB, help=f"MiB (default: {BUDGETS_MIB})")
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="a disk for weights and pages")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="port-lora-", dir=arguments.folder) as folder:
        make_model(Path(folder))
        rows = measure(Path(folder), arguments.budgets)
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        _print(rows)
    return 0 if all(row.equal for row in rows) else 1


def measure(folder: Path, budgets_mib: list[int]) -> list[Row]:
    """Return the row of plain PyTorch, and one for each budget in which the script finishes."""
    rows: list[Row] = []
    expected: list[str] = []
    for mib in (None, *budgets_mib):
        with tempfile.NamedTemporaryFile(suffix=".json") as report:
            words = [
                "-m",
                "port_agent.cli",
                "exec",
                "--ram",
                f"{mib}M",
                "--page-dir",
                str(folder),
                "--report",
                report.name,
                "--",
            ]
            done = subprocess.run(
                [sys.executable, "-W", "ignore", *(words if mib else []), "-m", "benchmarks.lora_loop", str(folder), str(STEPS)],
                env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=TIMEOUT_S,
            )  # fmt: skip
            if done.returncode != 0:
                print(f"{mib} MiB: {done.stderr.splitlines()[-1]}", file=sys.stderr)
                continue
            moved: dict[str, Any] = json.loads(Path(report.name).read_text()) if mib else {}
        result = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
        expected = expected or result["losses"]
        read, written, mapped, recomputed = (
            moved.get(f"{what}_bytes", 0) / 2**20 / STEPS for what in ("read", "written", "mapped", "recomputed")
        )
        rows.append(
            Row(
                mib,
                result["peak_mib"],
                statistics.median(result["cpu_s"][1:]),
                statistics.median(result["wall_s"][1:]),
                result["wall_s"][0],
                read,
                written,
                mapped,
                recomputed,
                result["losses"] == expected,
            )
        )
    return rows


def make_model(folder: Path, shape: str = TINYLLAMA, layers: int | None = None) -> None:
    """Write a TinyLlama-1.1B, or a Qwen2.5-0.5B, with random bfloat16 weights to `folder`;
    `layers` may make it smaller.

    This happens in a separate process: a child's `ru_maxrss` begins with that of its parent.
    """
    making = multiprocessing.get_context("spawn").Process(target=_write_model, args=(folder, shape, layers))
    making.start()
    making.join()
    if making.exitcode != 0:
        raise SystemExit("the model could not be written; see above")


def _write_model(folder: Path, shape: str, layers: int | None) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    changes = {} if layers is None else {"num_hidden_layers": layers}
    config = AutoConfig.for_model(**SHAPES[shape] | changes)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def _print(rows: list[Row]) -> None:
    table = Table(title="TinyLlama-1.1B bf16, LoRA, 1 x 128 tokens: the same script, plain and followed")
    columns = (
        "budget MiB", "peak MiB", "CPU s/step", "of plain", "wall s/step", "first step s", "read MiB", "written MiB",
        "mapped MiB", "recomputed MiB", "losses equal",
    )  # fmt: skip
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            "plain" if row.ram_mib is None else str(row.ram_mib),
            str(row.peak_mib),
            f"{row.cpu_s:.2f}",
            f"{row.cpu_s / rows[0].cpu_s:.2f}",
            f"{row.wall_s:.2f}",
            f"{row.first_wall_s:.2f}",
            f"{row.read_mib:.0f}",
            f"{row.written_mib:.0f}",
            f"{row.mapped_mib:.0f}",
            f"{row.recomputed_mib:.0f}",
            "yes" if row.equal else "NO",
        )
    table_console(130).print(table)


if __name__ == "__main__":
    sys.exit(main())
