"""Public programs, unchanged, compared with themselves under `port-agent exec`:
`python -m benchmarks.public_programs --checkouts DIR`.

DIR has checkouts of pytorch/examples as `examples`, of karpathy/minGPT as `minGPT` and karpathy/nanoGPT as
`nanoGPT`; the libraries of `benchmarks/public/requirements.txt` are installed. Each program runs plainly (twice if
`exec` gives other results) and within each budget. Its exit code, its output without times, and every file that it
leaves are compared byte by byte.
"""

import argparse
import filecmp
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from benchmarks.public.programs import PROGRAMS, PublicProgram
from benchmarks.tables import table_console

_HERE = Path(__file__).parent / "public"
_TIMES = re.compile(
    r"(?i)[\d.]+ ?(ms|s|sec|seconds|it/s)\b|(ms/batch|time|iter_dt|dt|mfu|_per_second|runtime)\W*[\d.]+%?"
)
_NOT_COMPARED = re.compile(r"__pycache__|\.pyc$|\.log$|/runs/|trainer_state\.json$|training_args\.bin$")
_OURS = "port-agent: "


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run ended: exit code, output without times, its directory, and the message of `exec`."""

    code: int
    output: str
    folder: Path
    said: str
    errors: str


def main() -> int:
    """Parse the command line, run, print; return 1 if a program differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkouts", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--tensors", action="append", default=[], metavar="BYTES", help="budgets for tensors (default: 4M)"
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="programs whose names contain this")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there, too")
    arguments = parser.parse_args()
    rows = [
        (program.name, budget, *judge(program, arguments.checkouts, budget))
        for program in PROGRAMS
        if any(part in program.name for part in arguments.only or [""])
        for budget in arguments.tensors or ["4M"]
    ]
    table = Table("program", "--tensors", "verdict", "what exec said", title="public programs under exec")
    for row in rows:
        table.add_row(*row)
    table_console(160).print(table)
    if arguments.markdown:
        lines = [
            "| program | `--tensors` | verdict | what exec said |",
            "|---|---|---|---|",
            *(f"| {' | '.join(row)} |" for row in rows),
        ]
        arguments.markdown.write_text("\n".join(lines) + "\n")
    return int(any(verdict.startswith("differs") for _, _, verdict, _ in rows))


def judge(program: PublicProgram, checkouts: Path, budget: str) -> tuple[str, str]:
    """Return a verdict and the last line of `exec`."""
    print(f"{program.name} ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as root:
        plain = _run(program, checkouts, Path(root) / "plain", [])
        if plain.code:
            return f"does not run plain: {plain.errors.strip().splitlines()[-1]}", ""
        budgeted = _run(
            program,
            checkouts,
            Path(root) / "exec",
            [sys.executable, "-P", "-m", "port_agent.cli", "exec", "--tensors", budget, "--"],
        )
        difference = _difference(plain, budgeted)
        if difference and _difference(plain, _run(program, checkouts, Path(root) / "again", [])):
            return "does not equal itself plain", budgeted.said
        return f"differs: {difference}" if difference else f"equal, {_files(plain.folder)} files", budgeted.said


def _run(program: PublicProgram, checkouts: Path, folder: Path, before: list[str]) -> RunEnd:
    if program.repository:
        shutil.copytree(checkouts / program.repository / program.folder, folder, ignore=shutil.ignore_patterns(".git"))
    else:
        folder.mkdir()
    driver = _HERE / "drivers" / program.words[0]
    if driver.exists():
        shutil.copy(driver, folder)
    program.prepare(folder)
    (folder.parent / "data").mkdir(exist_ok=True)
    standins = [str(_HERE / "standins")] if program.repository else []
    search = os.pathsep.join((*standins, str(folder), os.environ.get("PYTHONPATH", "")))
    environment = {
        **os.environ,
        "PYTHONPATH": search,
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
        "MPLBACKEND": "agg",
    }
    words = [*(before or [sys.executable]), *program.words]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines() if line.startswith(_OURS)]
    return RunEnd(
        done.returncode, _TIMES.sub("", done.stdout), folder, said[-1].removeprefix(_OURS) if said else "", done.stderr
    )


def _left(folder: Path) -> set[str]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)) for path in found if not _NOT_COMPARED.search(str(path))}


def _files(folder: Path) -> int:
    return len(_left(folder))


def _difference(plain: RunEnd, other: RunEnd) -> str:
    """Return what differs first, or ""."""
    if plain.code != other.code:
        return f"ended with {other.code}: {other.errors.strip().splitlines()[-1]}"
    if plain.output != other.output:
        pairs = zip(plain.output.splitlines(), other.output.splitlines(), strict=False)
        return next((f"{a!r} and {b!r}" for a, b in pairs if a != b), "the length of its output")
    if _left(plain.folder) != _left(other.folder):
        return f"which files are there: {sorted(_left(plain.folder) ^ _left(other.folder))[:4]}"
    names = sorted(_left(plain.folder))
    _, differing, lost = filecmp.cmpfiles(plain.folder, other.folder, names, shallow=False)
    return ", ".join([*differing, *lost])


if __name__ == "__main__":
    sys.exit(main())
