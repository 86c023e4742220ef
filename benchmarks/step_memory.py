"""Draw the memory of a training run in three ways:
`python -m benchmarks.step_memory --svg docs/images/step_memory.svg`.

The script of `make demo` (examples/shakespeare/train.py) runs with plain Python, through `port-agent exec --ram`, and
as a bundle. Meanwhile the resident memory of the process that computes is read every 10 ms. The picture shows each run
from the start of its process to the end of its last step, with a dot where a step ends. Linux only.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from examples.demo import RAM, SCRIPT, disk

STEPS = 3
PERIOD_S = 0.01
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 320, 60, 32, 20, 32
"""Pixels of the picture and its margins."""
COLOURS = ("#c4472b", "#2f6fb0", "#2c8a4b")


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Resident bytes of a run: (seconds since its start, bytes), and the seconds at which its steps ended."""

    name: str
    points: tuple[tuple[float, int], ...]
    step_ends: tuple[float, ...]

    @property
    def peak_bytes(self) -> int:
        """The most that was resident."""
        return max(resident for _, resident in self.points)

    def at(self, seconds: float) -> int:
        """Return the bytes that were resident at a moment."""
        return min(self.points, key=lambda point: abs(point[0] - seconds))[1]


def main() -> int:
    """Run all three, write the picture, print the peaks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--svg", type=Path, required=True, metavar="FILE", help="picture to write")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of each run (default {STEPS})")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="port-picture-", dir=disk()) as name:
        curves = measure(Path(name), arguments.steps)
    arguments.svg.write_text(picture(curves, int(RAM[:-1]) << 20))
    for curve in curves:
        print(
            f"{curve.name}: peak {curve.peak_bytes / 2**20:.0f} MiB, {curve.step_ends[-1]:.1f} s for {arguments.steps} "
            "steps"
        )
    return 0


def measure(folder: Path, steps: int) -> list[MemoryCurve]:
    """Return the memory of each way, with the script's page files and bundle in `folder`."""
    agent = [sys.executable, "-m", "port_agent.cli"]
    script = [str(SCRIPT), "--steps", str(steps), "--out", str(folder / "checkpoint.pt")]
    bundle = folder / "shakespeare.port"
    plan = ["plan", str(SCRIPT), "--ram", RAM, "-o", str(bundle), "--page-dir", str(folder), "--threads", "1"]
    ways: tuple[tuple[str, list[str], Callable[[str], bool]], ...] = (
        ("plain PyTorch", [sys.executable, "-u", *script], bool),
        (f"exec --ram {RAM}", [*agent, "exec", "--ram", RAM, "--page-dir", str(folder), "--", *script], bool),
        (
            f"bundle, --ram {RAM}",
            [*agent, "train", str(bundle), "--steps", str(steps), "--state-dir", str(folder / "state"), "--json"],
            is_step,
        ),
    )
    curves = []
    for title, command, ends_step in ways:
        if "train" in command:
            subprocess.run([*agent, *plan], check=True, stdout=sys.stderr)
        print(f"{title} ...", file=sys.stderr)
        curves.append(watched(title, command, ends_step))
    return curves


def is_step(line: str) -> bool:
    """Return whether a line of `train --json` reports a step."""
    return json.loads(line).get("event") == "step"


def watched(name: str, command: Sequence[str], ends_step: Callable[[str], bool]) -> MemoryCurve:
    """Run a command and return its memory until its last step ended; raise SystemExit if it fails or makes no step."""
    readings: list[tuple[float, int]] = []
    begin = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) as process:
        watch = threading.Thread(target=_watch, args=(process, readings))
        watch.start()
        ends = tuple(time.monotonic() - begin for line in process.stdout or () if ends_step(line))
    watch.join()
    if process.returncode or not ends:
        raise SystemExit(f"{name} ended with code {process.returncode} after {len(ends)} steps")
    points = tuple((moment - begin, resident) for moment, resident in readings if moment - begin <= ends[-1])
    return MemoryCurve(name, points, ends)


def _watch(process: "subprocess.Popen[str]", readings: list[tuple[float, int]]) -> None:
    """Read the resident memory of the largest process of a command until it ends."""
    family: list[psutil.Process] = []
    ticks = 0
    while process.poll() is None:
        try:
            if ticks % 50 == 0:
                parent = psutil.Process(process.pid)
                family = [parent, *parent.children(recursive=True)]
            readings.append((time.monotonic(), max(one.memory_info().rss for one in family)))
        except psutil.NoSuchProcess:
            ticks = -1
        ticks += 1
        time.sleep(PERIOD_S)


def picture(curves: Sequence[MemoryCurve], budget_bytes: int) -> str:
    """Return the curves as SVG that is light or dark like the reader's page."""
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    most_s = max(curve.step_ends[-1] for curve in curves)
    most_bytes = max(curve.peak_bytes for curve in curves) * 1.05

    def x(seconds: float) -> float:
        return LEFT + (right - LEFT) * seconds / most_s

    def y(resident: float) -> float:
        return bottom - (bottom - TOP) * resident / most_bytes

    line = y(budget_bytes)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-family="sans-serif" '
        'font-size="13">',
        f"<title>Resident memory of three steps: {_in_words(curves)}</title>",
        "<style>text{fill:#222}.axis{stroke:#999}.budget{stroke:#555;stroke-dasharray:5 4}"
        "@media(prefers-color-scheme:dark){text{fill:#ddd}.budget{stroke:#aaa}}</style>",
        f'<path class="axis" fill="none" d="M{LEFT} {TOP}V{bottom}H{right}"/>',
        f'<text x="{LEFT - 8}" y="{TOP - 14}" text-anchor="end">MiB</text>',
        f'<path class="budget" d="M{LEFT} {line:.1f}H{right}"/>',
        f'<text x="{right}" y="{line - 6:.0f}" text-anchor="end">budget, {budget_bytes / 2**20:.0f} MiB</text>',
    ]
    for mib in range(0, int(most_bytes / 2**20), 250):
        parts.append(f'<text x="{LEFT - 8}" y="{y(mib * 2**20) + 4:.0f}" text-anchor="end">{mib}</text>')
    for mark in range(0, int(most_s) + 1, 1 + int(most_s / 10)):
        parts.append(f'<text x="{x(mark):.0f}" y="{bottom + 18}" text-anchor="middle">{mark} s</text>')
    for index, (curve, colour) in enumerate(zip(curves, COLOURS, strict=True)):
        route = "L".join(f"{x(seconds):.1f} {y(resident):.1f}" for seconds, resident in curve.points[::2])
        parts.append(f'<path fill="none" stroke="{colour}" stroke-width="2" d="M{route}"/>')
        parts += [
            f'<circle cx="{x(end):.1f}" cy="{y(curve.at(end)):.1f}" r="4" fill="{colour}"/>' for end in curve.step_ends
        ]
        row = TOP + 60 + index * 22
        parts.append(f'<path stroke="{colour}" stroke-width="3" d="M{right - 280} {row - 4}h18"/>')
        parts.append(
            f'<text x="{right - 256}" y="{row}">{curve.name}: at most {curve.peak_bytes / 2**20:.0f} MiB</text>'
        )
    parts.append("</svg>\n")
    return "\n".join(parts)


def _in_words(curves: Sequence[MemoryCurve]) -> str:
    return ", ".join(f"{curve.name} at most {curve.peak_bytes / 2**20:.0f} MiB" for curve in curves)


if __name__ == "__main__":
    sys.exit(main())
