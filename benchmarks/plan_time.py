"""How long `port-agent plan` takes, by stage, and in how much memory: `python -m benchmarks.plan_time [JOB ...]`.

The command itself is run on a script of its own for each job, as a user would. CPU seconds are those of all
processes that planning starts, which other work on the machine disturbs less than the clock; the peak is that of
its largest process, as the kernel counts it. Operators are measured and compared in one process, whose CPU seconds
are counted in its last stage, `compare`. `lora`: a TinyLlama-1.1B with random bfloat16 weights, written to
safetensors once (2.2 GB, below --folder).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.lora import make_model

GOALS = {"demo": 30.0, "resnet50": 45.0, "gpt2": 60.0, "lora": 90.0}
"""Seconds that planning may take."""
BUDGETS_MIB = {"demo": 380, "resnet50": 400, "gpt2": 1200, "lora": 600}
STAGES = ("capture", "profile", "flash", "compare", "follow", "plan", "try")
DEMO = Path(__file__).parents[1] / "examples" / "shakespeare" / "train.py"

_MODEL_JOB = """
from benchmarks.plan_time_jobs import {maker} as made


def port_job():
    return made({argument!r})
"""


@dataclass(frozen=True)
class Row:
    """One job. `stages`: seconds by the clock and of processors."""

    job: str
    ram_mib: int
    wall_s: float
    cpu_s: float
    goal_s: float
    stages: dict[str, dict[str, float]]
    peak_mib: float
    bundle_mib: float


def main() -> int:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", help=f"of {', '.join(GOALS)} (default: all)")
    parser.add_argument("--ram", type=int, metavar="MIB", help="another budget than the job's own")
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="a disk for weights, pages and bundles")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for job in arguments.jobs or GOALS:
        with tempfile.TemporaryDirectory(prefix="port-plan-time-", dir=arguments.folder) as folder:
            rows.append(measure(job, arguments.ram or BUDGETS_MIB[job], Path(folder)))
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        _print(rows)
    return 0


def measure(job: str, ram_mib: int, folder: Path) -> Row:
    """Plan one job with one thread of compute; raise SystemExit with the command's message if it fails."""
    script, out = _script(job, folder), folder / "job.port"
    command = [
        "-m",
        "port_agent.cli",
        "plan",
        str(script),
        "--ram",
        f"{ram_mib}M",
        "-o",
        str(out),
        "--page-dir",
        str(folder),
        "--json",
    ]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{job}: {done.stderr.strip()[-2000:]}")
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    stages = facts["planning_stages"]
    return Row(
        job,
        ram_mib,
        facts["planning_s"],
        sum(taken["cpu_s"] for taken in stages.values()),
        GOALS[job],
        stages,
        facts["planning_peak_bytes"] / 2**20,
        out.stat().st_size / 2**20,
    )


def _script(job: str, folder: Path) -> Path:
    if job == "demo":
        return DEMO
    maker, argument = "model_job", job
    if job == "lora":
        maker, argument = "lora_job", str(folder)
        make_model(folder)
    script = folder / f"{job}_job.py"
    script.write_text(_MODEL_JOB.format(maker=maker, argument=argument))
    return script


def _print(rows: list[Row]) -> None:
    table = Table(title="port-agent plan: seconds by the clock (of processors)")
    for column in ("job", "budget MiB", "all", "goal", *STAGES, "largest process MiB", "bundle MiB"):
        table.add_column(column, justify="left" if column == "job" else "right")
    for row in rows:
        taken = [row.stages.get(stage, {"wall_s": 0.0, "cpu_s": 0.0}) for stage in STAGES]
        table.add_row(
            row.job,
            str(row.ram_mib),
            f"{row.wall_s:.0f} ({row.cpu_s:.0f})",
            f"{row.goal_s:.0f}",
            *(f"{stage['wall_s']:.0f} ({stage['cpu_s']:.0f})" for stage in taken),
            f"{row.peak_mib:.0f}",
            f"{row.bundle_mib:.1f}",
        )
    Console(width=None if sys.stdout.isatty() else 130).print(table)


if __name__ == "__main__":
    sys.exit(main())
