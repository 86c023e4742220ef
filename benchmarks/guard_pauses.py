"""How soon a program on guarded memory stops on command, even inside long operators, and how soon its RAM is free.

    python -m benchmarks.guard_pauses [--pauses 200] [--width 1200]

The program multiplies matrices and factors them (QR), whole operators of tens of milliseconds; it is paused at any
moment, and must print what it prints without a pause.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from port_agent.guard import ProcessTable
from port_planner.base.units import format_bytes

PROGRAM = """
import sys, zlib, torch
torch.manual_seed(0)
rounds, width = map(int, sys.argv[1:])
a, b = torch.randn(width, width), torch.randn(width, width) / width**0.5
print("ready", flush=True)
for _ in range(rounds):
    a = torch.linalg.qr(torch.tanh(a @ b))[0] * 3
print(zlib.crc32(a.contiguous().numpy()))
"""
LOOK_S = 0.0005


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pauses", type=int, default=200)
    parser.add_argument("--width", type=int, default=1200)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        script = Path(folder) / "train.py"
        script.write_text(PROGRAM)
        words = [str(script), str(max(1, arguments.pauses // 3)), str(arguments.width)]
        expected = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True).stdout
        bound = ["exec", "--page-dir", folder, "--ram", "1G", "--guard-only", "--", *words]
        with subprocess.Popen(
            [sys.executable, "-m", "port_agent.cli", *bound],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as program:
            output, held_s, released_s, left_bytes = _paused(program, arguments.pauses)
    for name, values in (("stopped", held_s), ("RAM back", released_s)):
        ordered = sorted(values)
        middle, late = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]
        print(f"{name:9} median {middle * 1e3:6.1f} ms, p99 {late * 1e3:6.1f} ms, of {len(ordered)} pauses")
    print(f"tensors left resident: {format_bytes(max(left_bytes))}; same bits: {output == expected}")


def _paused(program: "subprocess.Popen[str]", pauses: int) -> tuple[str, list[float], list[float], list[int]]:
    """Pause a program at random moments; return its output, how long each pause took, and how
    much of the tensors was left.
    """
    draw, held_s, released_s, left_bytes = random.Random(0), [], [], []
    assert program.stdout is not None
    output = program.stdout.readline()
    table = ProcessTable.of_program(program.pid)
    for _ in range(pauses):
        time.sleep(draw.uniform(0.02, 0.1))
        if program.poll() is not None:
            break
        begin_s = time.perf_counter()
        table.pause()
        while not table.held:
            time.sleep(LOOK_S)
        held_s.append(time.perf_counter() - begin_s)
        while not table.released:
            time.sleep(LOOK_S)
        released_s.append(time.perf_counter() - begin_s)
        left_bytes.append(table.tensor_bytes)
        table.resume()
        while table.held and program.poll() is None:
            time.sleep(LOOK_S)
    return output + program.stdout.read(), held_s, released_s, left_bytes


if __name__ == "__main__":
    main()
