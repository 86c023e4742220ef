"""Compare the speed and size of lossless packing with numpy's ways to do the same.

    python benchmarks/packing.py [--json] [--mib N]

Speeds are GB of unpacked data per second of one thread, best of several runs over memory that is already mapped; "copy"
is memcpy of the same data, "BitTrain's loop" its item by item in C++; lz4 and zstd-1 where they are installed. numpy
has no codec of its own: its rows use packbits, astype and boolean indexing, with their result checked like ours.
"""

import argparse
import ctypes
import importlib
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.tables import table_console
from port_agent.packing import (
    Codec,
    Layout,
    Quantization,
    codec,
    largest_bytes,
    multiply,
    pack,
    packed_bytes,
    scatter,
    select,
    unpack,
)
from port_agent.packing.quantized import NF4_LEVELS, QuantizedMatrix, decode

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
    """Of rows called backward: of that pass, straight from the packed form."""


def main() -> None:
    """Run the benchmark and print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    parser.add_argument("--mib", type=int, default=32, help="unpacked size of the data (default: %(default)s)")
    arguments = parser.parse_args()
    rows = [row for name, kind, array in data_sets(arguments.mib << 20) for row in measure(name, kind, array)]
    rows += bit_rows(arguments.mib << 20, Codec.SIGN) + bit_rows(arguments.mib << 20, Codec.INSIDE)
    rows += dropout_rows(arguments.mib << 20)
    rows += condition_rows(arguments.mib << 20)
    rows += pool_rows(arguments.mib << 20)
    rows += [row for grid in Quantization for row in grid_rows(grid, arguments.mib << 20)]
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
    if kind is Codec.BITMAP and array.dtype == np.float32:
        rows += loop_row(name, array)
        rows += compressor_rows(name, array)
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


def loop_row(name: str, array: NDArray[np.generic]) -> list[Row]:
    """Return the row of BitTrain's own loop, compiled here; none without a C++ compiler."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        return []
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "loop.so"
        source = Path(__file__).with_name("packing_loop.cpp")
        subprocess.run([compiler, "-O3", "-shared", "-fPIC", "-o", str(built), str(source)], check=True)
        loop = ctypes.CDLL(str(built))
        restored = np.zeros_like(array)
        source_at, target = ctypes.c_void_p(array.ctypes.data), ctypes.c_void_p(restored.ctypes.data)
        count = ctypes.c_size_t(array.size)
        rates = (
            speed(array.nbytes, lambda: loop.loop_pack(source_at, count)),
            speed(array.nbytes, lambda: loop.loop_unpack(target)),
        )
    if not np.array_equal(restored, array):
        raise SystemExit(f"{name}: the loop does not give the data back")
    percent = 100 * (np.count_nonzero(array) * 4 + array.size / 8) / array.nbytes
    return [Row(name, "BitTrain's loop", percent, None, *rates)]


def compressor_rows(name: str, array: NDArray[np.generic]) -> list[Row]:
    """Return the rows of lz4 and zstd at level 1; none if they are not installed."""
    found, content = [], array.tobytes()
    for module, pack_name, unpack_name in (
        ("lz4.frame", "compress", "decompress"),
        ("zstandard", "compress", "decompress"),
    ):
        try:
            codec_module = importlib.import_module(module)
        except ImportError:
            continue
        arguments = {"level": 1} if module == "zstandard" else {}
        pack_it = partial(getattr(codec_module, pack_name), content, **arguments)
        packed = pack_it()
        rates = speed(len(content), pack_it), speed(len(content), partial(getattr(codec_module, unpack_name), packed))
        label = "zstd-1" if module == "zstandard" else "lz4"
        found.append(Row(name, label, 100 * len(packed) / len(content), None, *rates))
    return found


def dropout_rows(size_bytes: int) -> list[Row]:
    """Return the rows of dropout's backward pass: torch's product with the mask, and ours with its packed form."""
    import torch

    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(2)
    gradient, found = torch.randn(size_bytes // 4, generator=draw), torch.empty(size_bytes // 4)
    mask = torch.empty_like(gradient).bernoulli_(0.9, generator=draw).div_(0.9)
    expected, layout = torch.empty_like(gradient), Layout(Codec.PAIR, gradient.numel())
    name = "float32, dropout backward"
    by_torch = speed(size_bytes, lambda: torch.mul(gradient, mask, out=expected))
    rows = [Row(name, "torch", 100.0, None, None, by_torch)]
    packed = torch.zeros(largest_bytes(layout), dtype=torch.uint8)
    for level in range(codec.best_level() + 1):
        size = pack(layout, mask.data_ptr(), packed.data_ptr(), packed.numel(), level=level)
        forward = partial(pack, layout, mask.data_ptr(), packed.data_ptr(), packed.numel(), level=level)
        backward = partial(
            multiply, layout, packed.data_ptr(), size, gradient.data_ptr(), found.data_ptr(), level=level
        )
        rates = speed(size_bytes, forward), speed(size_bytes, backward)
        _check_equal(name, level, found, expected)
        rows.append(Row(name, f"ours: {LEVEL_NAMES[level]}", 100 * size / size_bytes, None, *rates))
    return rows


def condition_rows(size_bytes: int) -> list[Row]:
    """Return the rows of the backward pass of `where`: of torch on booleans, and of ours on bits."""
    import torch

    count, draw = size_bytes // 4, torch.Generator().manual_seed(3)
    gradient, found = torch.randn(count, generator=draw), torch.empty(count)
    condition, zero, expected = torch.rand(count, generator=draw) < 0.5, torch.tensor(0.0), torch.empty(count)
    name, layout = "float32, where backward", Layout(Codec.BITS, count)
    by_torch = speed(size_bytes, lambda: torch.where(condition, gradient, zero, out=expected))
    rows = [Row(name, "torch", 100 * count / size_bytes, None, None, by_torch)]
    packed = torch.zeros(largest_bytes(layout), dtype=torch.uint8)
    for level in range(codec.best_level() + 1):
        size = pack(layout, condition.data_ptr(), packed.data_ptr(), packed.numel(), level=level)
        forward = partial(pack, layout, condition.data_ptr(), packed.data_ptr(), packed.numel(), level=level)
        backward = partial(select, layout, packed.data_ptr(), size, gradient.data_ptr(), found.data_ptr(), level=level)
        rates = speed(size_bytes, forward), speed(size_bytes, backward)
        _check_equal(name, level, found, expected)
        rows.append(Row(name, f"ours: {LEVEL_NAMES[level]}", 100 * size / size_bytes, None, *rates))
    return rows


def pool_rows(size_bytes: int) -> list[Row]:
    """Return the rows of max pooling's backward pass: of torch on 64-bit indices, and of ours on packed ones."""
    import torch

    torch.set_num_threads(1)
    side, draw = 56, torch.Generator().manual_seed(4)
    planes = max(size_bytes // 4 // side**2, 1)
    x = torch.randn(1, planes, side, side, generator=draw)
    made, indices = torch.nn.functional.max_pool2d(x, 2, return_indices=True)
    gradient, found, expected = torch.randn(made.shape, generator=draw), torch.empty_like(x), torch.empty_like(x)
    name, layout = "int64, max pool backward", Layout(Codec.NARROW, indices.numel())
    backward_of = torch.ops.aten.max_pool2d_with_indices_backward.grad_input
    by_torch = speed(
        indices.nbytes,
        lambda: backward_of(gradient, x, [2, 2], [2, 2], [0, 0], [1, 1], False, indices, grad_input=expected),
    )
    packed = torch.zeros(largest_bytes(layout), dtype=torch.uint8)
    size = pack(layout, indices.data_ptr(), packed.data_ptr(), packed.numel())
    forward = partial(pack, layout, indices.data_ptr(), packed.data_ptr(), packed.numel())
    backward = partial(
        scatter, layout, packed.data_ptr(), size, gradient.data_ptr(), found.data_ptr(), planes=planes, places=side**2
    )
    rates = speed(indices.nbytes, forward), speed(indices.nbytes, backward)
    _check_equal(name, codec.best_level(), found, expected)
    best = f"ours: {LEVEL_NAMES[codec.best_level()]}"
    return [Row(name, "torch", 100.0, None, None, by_torch), Row(name, best, 100 * size / indices.nbytes, None, *rates)]


def _check_equal(name: str, level: int, found: Any, expected: Any) -> None:
    import torch

    if not torch.equal(found.view(torch.int32), expected.view(torch.int32)):
        raise SystemExit(f"{name}: level {level} does not give torch's gradients")


def bit_rows(size_bytes: int, kind: Codec) -> list[Row]:
    """Return the rows of the backward pass of ReLU (SIGN) or ReLU6 (INSIDE), of the activation by torch and from
    bits by each of our levels.
    """
    import torch

    torch.set_num_threads(1)
    activation, gradient = (
        3 * torch.randn(size_bytes // 4, generator=torch.Generator().manual_seed(s)) for s in (0, 1)
    )
    expected, found = torch.empty_like(gradient), torch.empty_like(gradient)
    name, backward = "float32, ReLU backward", torch.ops.aten.threshold_backward.grad_input
    asked: tuple[float, ...] = (0.0,)
    if kind is Codec.INSIDE:
        name, backward = "float32, ReLU6 backward", torch.ops.aten.hardtanh_backward.grad_input
        asked = (0.0, 6.0)
    by_torch = speed(size_bytes, lambda: backward(gradient, activation, *asked, grad_input=expected))
    rows = [Row(name, "torch", 100.0, None, None, by_torch)]
    layout = Layout(kind, activation.numel(), interval=(0.0, 6.0))
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


def grid_rows(grid: Quantization, size_bytes: int) -> list[Row]:
    """Return the rows of weights on a grid, decoded to bfloat16: torch's own operators, and every level of ours."""
    import torch

    name, columns = f"{grid.value} to bfloat16", 4096
    rows = size_bytes // 2 // columns
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (rows, columns * grid.code_bits // 8), dtype=torch.uint8, generator=draw)
    scales = torch.rand(rows, columns // grid.block, generator=draw)
    made = torch.empty(rows, columns, dtype=torch.bfloat16)
    matrix = QuantizedMatrix(grid, codes.data_ptr(), scales.data_ptr(), columns)
    levels = torch.tensor(NF4_LEVELS)

    def with_torch() -> torch.Tensor:
        numbers = codes.view(torch.int8).float()
        if grid is Quantization.NF4:
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


def numpy_row(name: str, kind: Codec, array: NDArray[Any]) -> Row:
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
    """Return GB/s of CPU time: the median of the faster half of the runs, so that neighbours
    on the machine count less.
    """
    action()
    seconds = []
    for _ in range(RUNS):
        start = time.thread_time()
        action()
        seconds.append(time.thread_time() - start)
    return size_bytes / statistics.median(sorted(seconds)[: RUNS // 2 + 1]) / 1e9


def print_table(rows: list[Row], mib: int) -> None:
    """Print the rows for people."""
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
    table_console().print(table)


if __name__ == "__main__":
    main()
