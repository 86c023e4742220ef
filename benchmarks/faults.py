"""What an access to an evicted block costs by SIGSEGV, as the guard does it, and by userfaultfd(2).

    python -m benchmarks.faults [--rounds 15]

Blocks of 256 KiB that are filled from memory, so that only the mechanism differs; the two take turns, and medians are
given. The last column says whether the kernel itself finds the block's contents in a raw read(2), which no library
stands in for. Needs a C compiler, and userfaultfd: root, or a readable /dev/userfaultfd.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from rich.table import Table

from benchmarks.tables import table_console

SOURCE = Path(__file__).with_name("faults.c")


def main() -> int:
    """Print the table; returns 1 if the program does not run here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="turns of both mechanisms (default 15)")
    rounds = parser.parse_args().rounds
    taken_ns, served = defaultdict[str, list[float]](list), {}
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "faults"
        subprocess.run(["cc", "-O2", "-pthread", str(SOURCE), "-o", str(program)], check=True)
        for _ in range(rounds):
            done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
            if done.returncode:
                print(done.stderr.strip(), file=sys.stderr)
                return 1
            for line in done.stdout.splitlines():
                mechanism, each_ns, served[mechanism] = line.split()
                taken_ns[mechanism].append(float(each_ns))
    table = Table("mechanism", "us per block of 256 KiB", "the kernel finds it")
    for mechanism, each in taken_ns.items():
        table.add_row(mechanism, f"{statistics.median(each) / 1e3:.0f}", served[mechanism])
    table_console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
