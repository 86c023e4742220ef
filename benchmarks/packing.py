"""Compare the speed and size of lossless packing with numpy's ways to do the same.

    python benchmarks/packing.py [--json] [--mib N]

Speeds are GB of unpacked data per second of one thread, best of several runs over memory that is already mapped; "copy"
is memcpy of the same data. numpy has no codec of its own: its rows use packbits, astype and boolean indexing, with
their result checked like ours.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from agent.packing import (
    Codec,
    Layout,
    QuantizationGrid,
    codec,
    largest_bytes,
    pack,
    packed_bytes,
    select,
    unpack,
)
from agent.packing.grids import NF4_LEVELS, GridMatrix, decode

LEVEL_NAMES = ("scalar", "baseline", "AVX2", "AVX-512")  # enum pack_level of packing.h
RUNS = 7


@dataclass(frozen=True, slots=True)
class Row:
    """One way to pack one kind of data."""

    data: str
    method: str
    percent_of_source: float
    size_gb_per_s: float | None
    """Speed of the exact size query; None where there is none or it needs no look at the data."""
    pack_gb_per_s: float | None
    unpack_gb_per_s: float
    """Of `sign`: of ReLU's backward pass, straight from the bits."""


def main() -> None:
    """Run the benchmark and print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    parser.add_argument("--mib", type=int, default=32, help="unpacked size of the data (default: %(default)s)")
    arguments = parser.parse_args()
    rows = [row for name, kind, array in data_sets(arguments.mib << 20) for row in measure(name, kind, array)]
    rows += sign_rows(arguments.mib << 20)
    rows += [row for grid in QuantizationGrid for row in grid_rows(grid, arguments.mib << 20)]
    if arguments.json:
        print(json.dumps({"mib": arguments.mib, "rows": [asdict(row) for row in rows]}))
    else:
        print_table(rows, arguments.mib)


def data_sets(size_bytes: int) -> list[tuple[str, Codec, NDArray[np.generic]]]:
    """Return what training keeps: masks, pooling indices, activations after ReLU."""
    draw = np.random.default_rng(0)
    activations = draw.standard_normal(size_bytes // 4, dtype=np.float32)
    sparse = np.where(draw.random(size_bytes // 4, dtype=np.float32) < 0.9, np.float32(0), activations)
    return [
        ("mask, bool", Codec.BITS, draw.random(size_bytes) < 0.9),
        ("indices, int64", Codec.NARROW, draw.integers(0, 112 * 112, size_bytes // 8)),
        ("float32, 50 % zero", Codec.BITMAP, np.maximum(activations, 0)),
        ("float32, 90 % zero", Codec.BITMAP, sparse),
        (
            "float16, 50 % zero",
            Codec.BITMAP,
            np.maximum(activations[: size_bytes // 2], 0).astype(np.float16),
        ),
    ]


def measure(name: str, kind: Codec, array: NDArray[np.generic]) -> list[Row]:
    """Return the rows of one data set: a plain copy, numpy, and every level of ours."""
    copy = np.empty_like(array)
    copied = speed(array.nbytes, lambda: np.copyto(copy, array))
    rows = [Row(name, "copy", 100.0, None, copied, copied), numpy_row(name, kind, array)]
    layout = Layout(kind, array.size, array.itemsize)
    packed, restored = np.zeros(largest_bytes(layout), np.uint8), np.zeros_like(array)
    source, target, back = array.ctypes.data, packed.ctypes.data, restored.ctypes.data
    for level in range(codec.best_level() + 1):
        restored.fill(0)
        size = pack(layout, source, target, packed.size, level=level)
        unpack(layout, target, size, back, level=level)
        if restored.tobytes() != array.tobytes():
            raise SystemExit(f"{name}: level {level} does not give the data back")

        def query(level: int = level) -> None:
            packed_bytes(layout, source, level=level)

        def forward(level: int = level) -> None:
            pack(layout, source, target, packed.size, level=level)

        def backward(level: int = level, size: int = size) -> None:
            unpack(layout, target, size, back, level=level)

        rows.append(
            Row(
                name,
                f"ours: {LEVEL_NAMES[level]}",
                100 * size / array.nbytes,
                None if kind is Codec.BITS else speed(array.nbytes, query),
                speed(array.nbytes, forward),
                speed(array.nbytes, backward),
            )
        )
    return rows


def sign_rows(size_bytes: int) -> list[Row]:
    """Return the rows of ReLU's backward pass, of the activation by torch and from packed signs by every level of ours."""
    import torch

    torch.set_num_threads(1)
    activation, gradient = (torch.randn(size_bytes // 4, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    expected, found = torch.empty_like(gradient), torch.empty_like(gradient)
    backward = torch.ops.aten.threshold_backward.grad_input
    name = "float32, ReLU backward"
    by_torch = speed(size_bytes, lambda: backward(gradient, activation, 0, grad_input=expected))
    rows = [Row(name, "torch", 100.0, None, None, by_torch)]
    layout = Layout(Codec.SIGN, activation.numel())
    packed = torch.zeros(largest_bytes(layout), dtype=torch.uint8)
    source, bits, gradients, target = (t.data_ptr() for t in (activation, packed, gradient, found))
    for level in range(codec.best_level() + 1):
        size = pack(layout, source, bits, packed.numel(), level=level)

        def forward(level: int = level) -> None:
            pack(layout, source, bits, packed.numel(), level=level)

        def from_bits(level: int = level, size: int = size) -> None:
            select(layout, bits, size, gradients, target, level=level)

        rates = speed(size_bytes, forward), speed(size_bytes, from_bits)
        if not torch.equal(found.view(torch.int32), expected.view(torch.int32)):
            raise SystemExit(f"{name}: level {level} does not give torch's gradients")
        rows.append(Row(name, f"ours: {LEVEL_NAMES[level]}", 100 * size / size_bytes, None, *rates))
    return rows


def grid_rows(grid: QuantizationGrid, size_bytes: int) -> list[Row]:
    """Return the rows of weights on a grid, decoded to bfloat16: torch's own operators, and every level of ours."""
    import torch

    name, columns = f"{grid.value} to bfloat16", 4096
    rows = size_bytes // 2 // columns
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (rows, columns * grid.code_bits // 8), dtype=torch.uint8, generator=draw)
    scales = torch.rand(rows, columns // grid.block, generator=draw)
    made = torch.empty(rows, columns, dtype=torch.bfloat16)
    matrix = GridMatrix(grid, codes.data_ptr(), scales.data_ptr(), columns)
    levels = torch.tensor(NF4_LEVELS)

    def with_torch() -> torch.Tensor:
        numbers = codes.view(torch.int8).float()
        if grid is QuantizationGrid.NF4:
            numbers = levels[torch.stack([codes & 15, codes >> 4], -1).int()]
        return (numbers.view(rows, -1, grid.block) * scales[..., None]).view(rows, columns).to(torch.bfloat16)

    expected = with_torch()
    percent = 100 * (codes.nbytes + scales.nbytes) / made.nbytes
    found = [Row(name, "torch", percent, None, None, speed(made.nbytes, with_torch))]
    for level in range(codec.best_level() + 1):
        made.zero_()

        def decoded(level: int = level) -> None:
            decode(matrix, range(rows), range(columns), 2, made.data_ptr(), level=level)

        rate = speed(made.nbytes, decoded)
        if not torch.equal(made, expected):
            raise SystemExit(f"{name}: level {level} does not give torch's weights")
        found.append(Row(name, f"ours: {LEVEL_NAMES[level]}", percent, None, None, rate))
    return found


def numpy_row(name: str, kind: Codec, array: NDArray[np.generic]) -> Row:
    """Return the row of the shortest numpy code that does the same."""
    restored = np.empty_like(array)
    if kind is Codec.BITS:
        state = [np.packbits(array)]

        def forward() -> None:
            state[0] = np.packbits(array)

        def backward() -> None:
            restored[:] = np.unpackbits(state[0], count=array.size).view(np.bool_)
    elif kind is Codec.NARROW:
        state = [array.astype(np.uint16)]

        def forward() -> None:
            state[0] = array.astype(np.min_scalar_type(array.max()))

        def backward() -> None:
            restored[:] = state[0]
    else:
        bits = array.view(f"u{array.itemsize}")
        mask = bits != 0
        state = [np.packbits(mask), bits[mask]]

        def forward() -> None:
            mask = bits != 0
            state[:] = [np.packbits(mask), bits[mask]]

        def backward() -> None:
            target = restored.view(bits.dtype)
            target[:] = 0
            target[np.unpackbits(state[0], count=array.size).view(np.bool_)] = state[1]

    packing, unpacking = speed(array.nbytes, forward), speed(array.nbytes, backward)
    if restored.tobytes() != array.tobytes():
        raise SystemExit(f"{name}: numpy does not give the data back")
    size = sum(part.nbytes for part in state)
    return Row(name, "numpy", 100 * size / array.nbytes, None, packing, unpacking)


def speed(size_bytes: int, action: Callable[[], object]) -> float:
    """Return GB/s of CPU time: the median of the faster half of the runs, so that neighbours on the machine count less."""
    action()
    seconds = []
    for _ in range(RUNS):
        start = time.thread_time()
        action()
        seconds.append(time.thread_time() - start)
    return size_bytes / statistics.median(sorted(seconds)[: RUNS // 2 + 1]) / 1e9


def print_table(rows: list[Row], mib: int) -> None:
    """Print the rows for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Packing of {mib} MiB, GB/s of unpacked data per core")
    table.add_column("data", no_wrap=True)
    table.add_column("method", no_wrap=True)
    for heading in ("size", "query", "pack", "unpack"):
        table.add_column(heading, justify="right", no_wrap=True)
    previous = ""
    for row in rows:
        if previous and row.data != previous:
            table.add_section()
        query = "" if row.size_gb_per_s is None else f"{row.size_gb_per_s:.1f}"
        table.add_row(
            row.data if row.data != previous else "",
            row.method,
            f"{row.percent_of_source:.1f} %",
            query,
            "" if row.pack_gb_per_s is None else f"{row.pack_gb_per_s:.1f}",
            f"{row.unpack_gb_per_s:.1f}",
        )
        previous = row.data
    Console().print(table)


if __name__ == "__main__":
    main()
