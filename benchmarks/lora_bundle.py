"""LoRA on Qwen2.5-0.5B's shape as a bundle, compared with plain PyTorch:
`python -m benchmarks.lora_bundle [--layers N]`.

Random bfloat16 weights are written to safetensors once (1 GB, below --folder). `port-agent plan` plans the
training of adapters on one sequence of 256 tokens within --ram, `port-agent train` trains the bundle, and plain
PyTorch the same job. CPU seconds are medians of the steps after the first. `--layers 4` tries the same with fewer
layers of the same shape.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.lora import QWEN, make_model
from benchmarks.tables import table_console

RAM_MIB, TOKENS, STEPS = 400, 256, 4

_SCRIPT = """
from benchmarks.plan_time_jobs import lora_job


def port_job():
    return lora_job({folder!r}, {tokens})
"""


@dataclass(frozen=True)
class Row:
    """One bundle compared with plain PyTorch.

    Bytes read and written are of flash, per step; `equal`: all losses, to the bit.
    """

    layers: int | None
    ram_mib: int
    planning_s: float
    planning_cpu_s: dict[str, float]
    planning_peak_mib: float
    peak_mib: float
    plain_peak_mib: float
    cpu_s: float
    plain_cpu_s: float
    wall_s: float
    read_mib: float
    written_mib: float
    state_mib: float
    """The job's state on flash."""
    equal: bool

    @property
    def ratio(self) -> float:
        """CPU seconds of a step, as a multiple of those of plain PyTorch."""
        return self.cpu_s / self.plain_cpu_s


def main() -> int:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, help="of the model (default: all 24)")
    parser.add_argument("--ram", type=int, default=RAM_MIB, metavar="MIB", help=f"budget (default {RAM_MIB})")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of training (default {STEPS})")
    parser.add_argument(
        "--folder", type=Path, default=Path("/var/tmp"), help="a disk for weights, pages and the bundle"
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="port-lora-", dir=arguments.folder) as folder:
        make_model(Path(folder), QWEN, arguments.layers)
        row = measure(Path(folder), arguments.layers, arguments.ram, arguments.steps)
    if arguments.json:
        print(json.dumps(asdict(row)))
    else:
        _print(row)
    return 0 if row.equal else 1


def measure(folder: Path, layers: int | None, ram_mib: int, steps: int) -> Row:
    """Plan and train the adapters of the model in `folder`; raise SystemExit with the command's message if it fails."""
    script, bundle, state = folder / "job.py", folder / "job.port", folder / "state"
    script.write_text(_SCRIPT.format(folder=str(folder), tokens=TOKENS))
    port = ["-m", "port_agent.cli"]
    *_, planned = _run(
        [*port, "plan", str(script), "--ram", f"{ram_mib}M", "-o", str(bundle), "--page-dir", str(folder), "--json"]
    )
    kept = ["--state-dir", str(state), "--checkpoint-every", str(steps)]
    events = _run([*port, "train", str(bundle), "--steps", str(steps), "--json", *kept])
    *plain_steps, plain = _run(["-m", "benchmarks.plain", str(script), str(bundle), str(steps)])
    ours = [event for event in events if event.get("event") == "step"]
    later = ours[1:]
    plain_s = [b["cpu_s"] - a["cpu_s"] for a, b in itertools.pairwise(plain_steps)]
    return Row(
        layers,
        ram_mib,
        planned["planning_s"],
        {stage: taken["cpu_s"] for stage, taken in planned["planning_stages"].items()},
        planned["planning_peak_bytes"] / 2**20,
        max(step["peak_rss_bytes"] for step in ours) / 2**20,
        plain["peak_rss_bytes"] / 2**20,
        statistics.median(step["cpu_s"] for step in later),
        statistics.median(plain_s),
        statistics.median(step["wall_s"] for step in later),
        statistics.mean(step["paged_in_bytes"] for step in later) / 2**20,
        statistics.mean(step["paged_out_bytes"] for step in later) / 2**20,
        sum(f.stat().st_size for f in state.rglob("*")) / 2**20,
        [step["loss"] for step in ours] == plain["losses"],
    )


def _run(words: list[str]) -> list[dict[str, Any]]:
    """Run a Python command with one thread of compute; return the JSON lines that it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-W", "ignore", *words], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words[:3])}: {done.stderr.strip()[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _print(row: Row) -> None:
    table = Table(title=f"LoRA on {QWEN} (bf16, 1 x {TOKENS}, layers: {row.layers or 'all'}) as a bundle")
    for column in ("budget MiB", "planned in s (CPU)", "planning MiB", "peak MiB", "plain MiB", "CPU s/step", "plain", "ratio", "s/step",
                   "read MiB", "written MiB", "state MiB", "losses equal"):  # fmt: skip
        table.add_column(column, justify="right")
    table.add_row(
        str(row.ram_mib),
        f"{row.planning_s:.0f} ({sum(row.planning_cpu_s.values()):.0f})",
        f"{row.planning_peak_mib:.0f}",
        f"{row.peak_mib:.0f}",
        f"{row.plain_peak_mib:.0f}",
        f"{row.cpu_s:.2f}",
        f"{row.plain_cpu_s:.2f}",
        f"{row.ratio:.2f}",
        f"{row.wall_s:.2f}",
        f"{row.read_mib:.0f}",
        f"{row.written_mib:.0f}",
        f"{row.state_mib:.0f}",
        "yes" if row.equal else "NO",
    )
    table_console(140).print(table)


if __name__ == "__main__":
    sys.exit(main())
