"""Save a checkpoint and continue from it within a budget: `python -m benchmarks.resume [WAY ...] [--budget MIB]`.

The unchanged scripts of `benchmarks.resume_loop` (a plain loop, transformers, lightning) train a GPT-2 of 6 layers with
AdamW and save a checkpoint; a new process continues from it and saves again: plain, and through `port-agent exec`,
where the kernel kills what goes beyond the budget (a memory cgroup, 16 MiB larger; where none can be made, the
RLIMIT_DATA that `exec` sets itself is all there is, and the table says so). A row for each process. Peaks are of the
whole process, times against plain PyTorch's, bytes are those of the whole process. `equal`: every file with weights,
moments or states of generators is plain PyTorch's, byte for byte.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash
from rich.table import Table

from benchmarks.fit import GROUP_BESIDE
from benchmarks.memory_group import group_obstacle, memory_group
from benchmarks.tables import table_console

WAYS = {"torch.save": "torch", "transformers": "transformers", "lightning": "lightning"}
"""What must be installed for each way."""
PARTS = ("train, save", "resume, train, save")
BUDGET_MIB = 900
TIMEOUT_S = 1800
TENSOR_FILES = frozenset({".pt", ".pth", ".ckpt", ".safetensors"})
READ_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Row:
    """One process, plain and within a budget."""

    way: str
    part: str
    plain_peak_mib: int
    bound: str
    peak_mib: int
    cpu_ratio: float
    wall_ratio: float
    read_mib: float
    written_mib: float
    equal: bool


def main() -> int:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", metavar="WAY", help=f"of {', '.join(WAYS)} (default: all)")
    parser.add_argument(
        "--budget", type=int, default=BUDGET_MIB, help="MiB of the whole process (default: %(default)s)"
    )
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="a disk for checkpoints and pages")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    limit_bytes = None if group_obstacle() else (arguments.budget << 20) + GROUP_BESIDE
    rows: list[Row] = []
    for way in arguments.ways or WAYS:
        if importlib.util.find_spec(WAYS[way]) is None:
            print(f"{way}: not installed", file=sys.stderr)
            continue
        rows += measure(way, ("--ram", f"{arguments.budget}M"), arguments.folder, limit_bytes=limit_bytes)
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        _print(rows, grouped=limit_bytes is not None)
    return 0 if all(row.equal for row in rows) else 1


def measure(
    way: str, bound: tuple[str, str], folder: Path, *, limit_bytes: int | None = None, size: tuple[str, ...] = ()
) -> list[Row]:
    """Return a row for each process of one way; `size` is the last argument of `benchmarks.resume_loop`."""
    with tempfile.TemporaryDirectory(prefix="port-resume-", dir=folder) as private:
        here = Path(private) / "out"
        plain = _run(way, here, size, (), None)
        followed = _run(way, here, size, bound, limit_bytes)
    return [
        Row(
            way,
            part,
            expected["peak_mib"],
            " ".join(bound),
            found["peak_mib"],
            found["cpu_s"] / expected["cpu_s"],
            found["wall_s"] / expected["wall_s"],
            found["read_bytes"] / 2**20,
            found["written_bytes"] / 2**20,
            found["files"] == expected["files"],
        )
        for part, expected, found in zip(PARTS, plain, followed, strict=True)
    ]


def _run(
    way: str, here: Path, size: tuple[str, ...], bound: tuple[str, ...], limit_bytes: int | None
) -> list[dict[str, Any]]:
    """Return what each of the two processes took, and checksums of what it saved in `here`;
    some files name that folder.
    """
    results = []
    here.mkdir()
    with tempfile.TemporaryDirectory(dir=here.parent) as pages:
        report = Path(pages) / "report.json"
        for _ in PARTS:
            words = (
                ["port_agent.cli", "exec", *bound, "--page-dir", pages, "--report", str(report), "--", "-m"]
                if bound
                else []
            )
            with _limited(limit_bytes) as enter:
                done = subprocess.run(
                    [sys.executable, "-W", "ignore", "-m", *words, "benchmarks.resume_loop", way, str(here), *size],
                    env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": pages},
                    preexec_fn=enter,
                    capture_output=True,
                    text=True,
                    timeout=TIMEOUT_S,
                )
            if done.returncode != 0:
                raise SystemExit(f"{way} does not finish: {done.stderr[-2000:]}")
            result = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"cpu_s"')))
            moved = json.loads(report.read_text()) if bound else {}
            results.append({**moved, **result, "files": checksums(here)})
    shutil.rmtree(here)
    return results


@contextlib.contextmanager
def _limited(limit_bytes: int | None) -> Iterator[Callable[[], None] | None]:
    """Return what a new process does to enter a memory cgroup of that size; nothing without one."""
    if limit_bytes is None:
        yield None
        return
    with memory_group(limit_bytes) as enter:
        yield lambda: enter(os.getpid())


def checksums(folder: Path) -> dict[str, str]:
    """Return the checksum of every file with tensors below `folder`, by its path there."""
    return {
        str(path.relative_to(folder)): _checksum(path)
        for path in sorted(folder.rglob("*"))
        if path.suffix in TENSOR_FILES
    }


def _checksum(path: Path) -> str:
    total = xxhash.xxh3_128()
    with path.open("rb") as file:
        while part := file.read(READ_AT_ONCE):
            total.update(part)
    return total.hexdigest()


def _print(rows: list[Row], *, grouped: bool) -> None:
    limit = "in a memory cgroup" if grouped else "under exec's own RLIMIT_DATA"
    table = Table(title=f"a GPT-2 of 6 layers, AdamW, 2 x 128 tokens: the same scripts, plain and followed {limit}")
    for name in Row.__dataclass_fields__:
        table.add_column(name.replace("_", " "), justify="left" if name in ("way", "part", "bound") else "right")
    for row in rows:
        table.add_row(
            row.way,
            row.part,
            str(row.plain_peak_mib),
            row.bound,
            str(row.peak_mib),
            f"{row.cpu_ratio:.2f}",
            f"{row.wall_ratio:.2f}",
            f"{row.read_mib:.0f}",
            f"{row.written_mib:.0f}",
            "yes" if row.equal else "NO",
        )
    table_console(140).print(table)


if __name__ == "__main__":
    sys.exit(main())
