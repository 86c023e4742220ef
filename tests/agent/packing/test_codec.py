"""Packing gives back every bit: hostile values, every size, every implementation, every wrong size."""

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from port_agent import packing
from port_agent.packing import (
    Codec,
    CorruptPackingError,
    Layout,
    PackingError,
    PackingOverflowError,
    PackingUnavailableError,
    UnsuitableDataError,
    codec,
    largest_bytes,
    multiply,
    pack,
    packed_bytes,
    scatter,
    select,
    unpack,
)
from tests.attack.outcome import AttackOutcome, Survived

built = pytest.mark.skipif(not packing.available(), reason="packing was not built (no compiler)")
LEVELS = range(codec.best_level() + 1) if packing.available() else range(1)
each_level = pytest.mark.parametrize("level", LEVELS)

Array = NDArray[np.generic]
GUARD = 0xA5

SIZES = [0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1000, 4097]
QEMU = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
LENGTHS = sorted({*range(0, 1026, 41), *SIZES})

# Bit patterns that arithmetic would not give back: NaNs with payload, quiet and signalling, both signs, -0.0,
# infinities, denormals, and items of which a single byte or bit is set.
HOSTILE = {
    2: [0x0000, 0x8000, 0x7C00, 0xFC00, 0x7E01, 0xFFFF, 0x7C01, 0x0001, 0x8001, 0x3C00, 0x0100],
    4: [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFFFFFFF, 0x7F800001, 0xFFA12345, 1, 0x80000001, 1 << 8],
    8: [0, 1 << 63, 0x7FF0 << 48, 0xFFF0 << 48, 0x7FF8_0000_0000_0001, 2**64 - 1, 0x7FF0_0000_0000_0001, 1, 1 << 40],
}


def layout_of(kind: Codec, array: Array) -> Layout:
    return Layout(kind, array.size, array.itemsize)


def round_trip(kind: Codec, array: Array, level: int, *, offset: int = 0) -> int:
    """Pack and unpack through memory with guards on both sides; return the packed size."""
    layout = layout_of(kind, array)
    source = np.full(array.nbytes + offset, GUARD, np.uint8)
    source[offset:] = np.ascontiguousarray(array).view(np.uint8).ravel() if array.size else source[offset:]
    size = packed_bytes(layout, source.ctypes.data + offset, level=level)
    assert size <= largest_bytes(layout)
    packed = np.full(offset + size + 64, GUARD, np.uint8)
    assert pack(layout, source.ctypes.data + offset, packed.ctypes.data + offset, size, level=level) == size
    assert (packed[:offset] == GUARD).all() and (packed[offset + size :] == GUARD).all()
    restored = np.full(offset + array.nbytes + 64, GUARD, np.uint8)
    unpack(layout, packed.ctypes.data + offset, size, restored.ctypes.data + offset, level=level)
    assert (restored[:offset] == GUARD).all() and (restored[offset + array.nbytes :] == GUARD).all()
    assert restored[offset : offset + array.nbytes].tobytes() == array.tobytes()
    return size


def overflows(kind: Codec, array: Array, capacity: int, level: int) -> None:
    """Check that packing into `capacity` bytes is refused without a byte written behind them."""
    layout = layout_of(kind, array)
    before = array.tobytes()
    packed = np.full(capacity + 256, GUARD, np.uint8)
    with pytest.raises(PackingOverflowError) as caught:
        pack(layout, array.ctypes.data, packed.ctypes.data, capacity, level=level)
    assert (packed[capacity:] == GUARD).all()
    assert caught.value.capacity_bytes == capacity
    assert array.tobytes() == before


@built
@each_level
@pytest.mark.parametrize("size", SIZES)
def test_bits_of_every_size(size: int, level: int) -> None:
    array = np.random.default_rng(size).integers(0, 2, size).astype(np.uint8)
    assert round_trip(Codec.BITS, array, level, offset=size % 5) == -(-size // 8)


@built
@each_level
def test_bits_agree_with_numpy(level: int) -> None:
    array = np.random.default_rng(1).integers(0, 2, 10_001).astype(np.bool_)
    layout = layout_of(Codec.BITS, array)
    packed = np.empty(largest_bytes(layout), np.uint8)
    pack(layout, array.ctypes.data, packed.ctypes.data, packed.size, level=level)
    assert packed.tobytes() == np.packbits(array, bitorder="little").tobytes()


@built
@each_level
@pytest.mark.parametrize("place", [0, 5, 31, 32, 99])
@pytest.mark.parametrize("value", [2, 3, 128, 255])
def test_bits_refuse_what_is_no_boolean(place: int, value: int, level: int) -> None:
    array = np.ones(100, np.uint8)
    array[place] = value
    packed = np.empty(13, np.uint8)
    with pytest.raises(UnsuitableDataError):
        pack(layout_of(Codec.BITS, array), array.ctypes.data, packed.ctypes.data, 13, level=level)


@built
@each_level
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("lowest", "span", "width"),
    [
        (0, 255, 1),
        (0, 256, 2),
        (-100, 1000, 2),  # labels with an ignored class
        (-(2**63), 65535, 2),
        (2**63 - 1 - 65536, 65536, 4),
        (7, 2**32 - 1, 4),
        (7, 2**32, 8),
        (-(2**63), 2**64 - 1, 8),
        (-5, 0, 1),
    ],
)
def test_narrow_takes_the_smallest_width(lowest: int, span: int, width: int, size: int, level: int) -> None:
    draw = np.random.default_rng(size)
    offsets = [0, span, *(int(draw.integers(0, span, endpoint=True, dtype=np.uint64)) for _ in range(size))][:size]
    array = np.array([lowest + offset for offset in offsets], np.int64)
    expected = width if size > 1 else 1
    assert round_trip(Codec.NARROW, array, level, offset=size % 3) == 16 + expected * size


@built
@each_level
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("item_bytes", [2, 4, 8])
def test_bitmap_keeps_hostile_values(item_bytes: int, size: int, level: int) -> None:
    draw = np.random.default_rng(size)
    values = np.array(HOSTILE[item_bytes], np.uint64).astype(f"u{item_bytes}")
    array = values[draw.integers(0, len(values), size)]
    array[draw.random(size) < 0.5] = 0
    kept = int(np.count_nonzero(array))
    assert round_trip(Codec.BITMAP, array, level, offset=size % 7) == 8 * -(-size // 64) + item_bytes * kept


@built
@each_level
@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8])
@pytest.mark.parametrize("fill", ["zeros", "full", "first", "last"])
def test_bitmap_at_the_extremes_of_density(fill: str, item_bytes: int, level: int) -> None:
    array = np.full(1001, 255, f"u{item_bytes}") if fill == "full" else np.zeros(1001, f"u{item_bytes}")
    if fill in ("first", "last"):
        array[0 if fill == "first" else -1] = 1
    round_trip(Codec.BITMAP, array, level)


@built
@each_level
def test_negative_zero_is_not_zero(level: int) -> None:
    array = np.array([0.0, -0.0, 0.0, np.nan, -np.inf, 5e-324], np.float64)
    assert round_trip(Codec.BITMAP, array, level) == 8 + 8 * 4


@pytest.mark.slow
@built
@given(st.binary(max_size=2000), st.sampled_from([1, 2, 4, 8]), st.sampled_from(list(LEVELS)))
@settings(max_examples=200, deadline=None)
def test_any_bytes_survive_bitmap(data: bytes, item_bytes: int, level: int) -> None:
    usable = len(data) // item_bytes * item_bytes
    round_trip(Codec.BITMAP, np.frombuffer(data[:usable], f"u{item_bytes}"), level)


@pytest.mark.slow
@built
@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=100), st.sampled_from(list(LEVELS)))
@settings(max_examples=200, deadline=None)
def test_any_integers_survive_narrow(values: list[int], level: int) -> None:
    round_trip(Codec.NARROW, np.array(values, np.int64), level)


def gradients_by_sign(array: Array, gradients: Array, level: int, *, offset: int = 0) -> Array:
    """Return what `select` gives of the packed signs of `array`, through memory with guards behind it."""
    layout = layout_of(Codec.SIGN, array)
    source = np.full(array.nbytes + offset, GUARD, np.uint8)
    source[offset:] = array.view(np.uint8)
    packed = np.full(largest_bytes(layout) + 64, GUARD, np.uint8)
    size = pack(layout, source.ctypes.data + offset, packed.ctypes.data, largest_bytes(layout), level=level)
    target = np.full(array.nbytes + 64, GUARD, np.uint8)
    select(layout, packed.ctypes.data, size, gradients.ctypes.data, target.ctypes.data, level=level)
    assert size == -(-array.size // 8) and (packed[size:] == GUARD).all() and (target[array.nbytes :] == GUARD).all()
    return target[: array.nbytes].view(np.uint32)


@built
@each_level
@pytest.mark.parametrize("size", [s for s in SIZES if s])
def test_signs_give_what_relus_backward_pass_gives_of_the_items(size: int, level: int) -> None:
    torch = pytest.importorskip("torch")
    draw = np.random.default_rng(size)
    array, gradients = hostile_floats(size, draw), hostile_floats(size, draw)
    expected = torch.ops.aten.threshold_backward(torch.from_numpy(gradients), torch.from_numpy(array), 0)
    found = gradients_by_sign(array, gradients, level, offset=size % 5)
    assert found.tobytes() == expected.numpy().tobytes()


def hostile_floats(size: int, draw: np.random.Generator) -> NDArray[np.float32]:
    """Return random bits, every second of them hostile."""
    hostile = np.array(HOSTILE[4], np.uint32)
    chosen = hostile[draw.integers(0, len(hostile), size)]
    return np.where(draw.random(size) < 0.5, chosen, draw.integers(0, 2**32, size)).astype(np.uint32).view(np.float32)


INTERVALS = [(0.0, 6.0), (-1.0, 1.0), (-0.0, np.inf), (1e-45, 3e38), (2.0, 2.0), (0.1, 0.7)]


@built
@each_level
@pytest.mark.parametrize("size", [s for s in SIZES if s])
def test_insides_give_what_hardtanhs_backward_pass_gives_of_the_items(size: int, level: int) -> None:
    torch = pytest.importorskip("torch")
    draw = np.random.default_rng(size)
    for interval in INTERVALS:
        array, gradients = hostile_floats(size, draw), hostile_floats(size, draw)
        ends = np.array([*interval, *np.nextafter(np.array(interval, np.float32), np.float32(0.5))], np.float32)
        array = np.where(draw.random(size) < 0.3, ends[draw.integers(0, 4, size)], array)
        layout = replace(layout_of(Codec.INSIDE, array), interval=interval)
        packed, target = np.full(largest_bytes(layout) + 64, GUARD, np.uint8), np.full(4 * size + 64, GUARD, np.uint8)
        if np.isnan(array).any():
            with pytest.raises(UnsuitableDataError, match="one is NaN"):
                pack(layout, array.ctypes.data, packed.ctypes.data, largest_bytes(layout), level=level)
            array = np.where(np.isnan(array), np.float32(0.5), array)
        length = pack(layout, array.ctypes.data, packed.ctypes.data, largest_bytes(layout), level=level)
        select(layout, packed.ctypes.data, length, gradients.ctypes.data, target.ctypes.data, level=level)
        expected = torch.ops.aten.hardtanh_backward(torch.from_numpy(gradients), torch.from_numpy(array), *interval)
        assert target[: 4 * size].tobytes() == expected.numpy().tobytes()
        assert (packed[length:] == GUARD).all() and (target[4 * size :] == GUARD).all()
        with pytest.raises(PackingOverflowError):
            pack(layout, array.ctypes.data, packed.ctypes.data, length - 1, level=level)


@built
@each_level
@pytest.mark.parametrize("place", [0, 7, 15, 30, 36])
def test_a_nan_anywhere_is_noticed(place: int, level: int) -> None:
    array, packed = np.ones(37, np.float32), np.zeros(5, np.uint8)
    array[place] = np.nan
    with pytest.raises(UnsuitableDataError):
        pack(Layout(Codec.INSIDE, 37, interval=(0, 6)), array.ctypes.data, packed.ctypes.data, 5, level=level)


@built
@each_level
def test_signs_do_not_come_back_and_damaged_ones_are_refused(level: int) -> None:
    array = np.ones(10, np.float32)
    layout, packed, target = layout_of(Codec.SIGN, array), np.zeros(2, np.uint8), np.full(40, GUARD, np.uint8)
    size = pack(layout, array.ctypes.data, packed.ctypes.data, 2, level=level)
    with pytest.raises(PackingError, match="signs do not restore the values"):
        unpack(layout, packed.ctypes.data, size, target.ctypes.data, level=level)
    with pytest.raises(PackingOverflowError):
        pack(layout, array.ctypes.data, packed.ctypes.data, 1, level=level)
    packed[1] |= 8  # item 11 of 10
    for length in (size, size - 1, size + 1):
        with pytest.raises(CorruptPackingError):
            select(layout, packed.ctypes.data, length, array.ctypes.data, target.ctypes.data, level=level)
    assert (target == GUARD).all()


@built
@each_level
@pytest.mark.parametrize("size", LENGTHS)
def test_pairs_come_back_and_multiply_as_torch_does(size: int, level: int) -> None:
    torch = pytest.importorskip("torch")
    draw = np.random.default_rng(size)
    hostile = np.array(HOSTILE[4], np.uint32)
    numbers = np.array([1 / 0.9, -2.0, 1e-45, 3e38, np.inf, -0.0], np.float32).view(np.uint32)
    other = numbers[size % len(numbers)]
    array = np.where(draw.random(size) < 0.7, other, np.uint32(0)).astype(np.uint32).view(np.float32)
    factors = np.where(
        draw.random(size) < 0.3, hostile[draw.integers(0, len(hostile), size)], draw.integers(0, 2**32, size)
    )
    factors = factors.astype(np.uint32).view(np.float32)
    round_trip(Codec.PAIR, array, level)
    layout = Layout(Codec.PAIR, size)
    packed, target = np.zeros(largest_bytes(layout), np.uint8), np.full(4 * size + 64, GUARD, np.uint8)
    length = pack(layout, array.ctypes.data, packed.ctypes.data, packed.size, level=level)
    multiply(layout, packed.ctypes.data, length, factors.ctypes.data, target.ctypes.data, level=level)
    expected = (torch.from_numpy(factors) * torch.from_numpy(array)).numpy()
    assert target[: 4 * size].tobytes() == expected.tobytes() and (target[4 * size :] == GUARD).all()
    with pytest.raises(CorruptPackingError):
        multiply(layout, packed.ctypes.data, length - 1, factors.ctypes.data, target.ctypes.data, level=level)
    if size > 2:
        array[:3] = 1.0, 2.0, 3.0
        with pytest.raises(UnsuitableDataError, match="a third value is among them"):
            pack(layout, array.ctypes.data, packed.ctypes.data, packed.size, level=level)


@built
@pytest.mark.parametrize(("kernel", "stride", "side"), [(2, 2, 16), (3, 2, 17), (3, 1, 9), (5, 5, 40)])
def test_pools_go_backward_from_packed_indices_as_torch_does(kernel: int, stride: int, side: int) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(kernel)
    x = torch.randn(2, 3, side, side).relu()
    made, indices = torch.nn.functional.max_pool2d(x, kernel, stride, return_indices=True)
    gradient = torch.randn_like(made)
    gradient.view(-1)[:3] = torch.tensor([-0.0, float("nan"), float("inf")])
    pool = torch.ops.aten.max_pool2d_with_indices_backward
    expected = pool(gradient, x, [kernel] * 2, [stride] * 2, [0, 0], [1, 1], False, indices)
    layout = Layout(Codec.NARROW, indices.numel())
    packed, found = np.zeros(largest_bytes(layout), np.uint8), torch.full_like(x, 7.0)
    size = pack(layout, indices.data_ptr(), packed.ctypes.data, packed.size)
    given = layout, packed.ctypes.data, size, gradient.data_ptr(), found.data_ptr()
    scatter(*given, planes=6, places=side * side)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    for planes, places, length in ((6, int(indices.max()), size), (6, side * side, size - 1)):
        with pytest.raises(CorruptPackingError):
            scatter(
                layout, packed.ctypes.data, length, gradient.data_ptr(), found.data_ptr(), planes=planes, places=places
            )
    with pytest.raises(PackingError, match="planes"):
        scatter(*given, planes=indices.numel() + 1, places=side * side)


@built
@each_level
def test_conditions_select_from_bits_as_torch_does(level: int) -> None:
    torch = pytest.importorskip("torch")
    draw = np.random.default_rng(level)
    for size in LENGTHS:
        mask, gradient = draw.random(size) < 0.5, draw.integers(0, 2**32, size).astype(np.uint32).view(np.float32)
        layout = Layout(Codec.BITS, size)
        packed, target = np.zeros(largest_bytes(layout), np.uint8), np.full(4 * size, GUARD, np.uint8)
        length = pack(layout, mask.ctypes.data, packed.ctypes.data, packed.size, level=level)
        for inverted in (False, True):
            select(
                layout,
                packed.ctypes.data,
                length,
                gradient.ctypes.data,
                target.ctypes.data,
                inverted=inverted,
                level=level,
            )
            expected = torch.where(torch.from_numpy(mask) ^ inverted, torch.from_numpy(gradient), torch.tensor(0.0))
            assert target.tobytes() == expected.numpy().tobytes()


def samples() -> Iterator[tuple[Codec, Array]]:
    draw = np.random.default_rng(5)
    yield Codec.BITS, draw.integers(0, 2, 999).astype(np.uint8)
    yield Codec.NARROW, draw.integers(-70_000, 70_000, 999)
    for item_bytes in (1, 2, 4, 8):
        yield Codec.BITMAP, (draw.integers(0, 2, 999) * draw.integers(1, 200, 999)).astype(f"u{item_bytes}")


@built
@each_level
def test_overflow_at_every_capacity_below_the_size(level: int) -> None:
    for kind, array in samples():
        size = packed_bytes(layout_of(kind, array), array.ctypes.data, level=level)
        for capacity in [0, 1, 8, 15, 16, size // 2, *range(size - 40, size)]:
            overflows(kind, array, capacity, level)


@built
@each_level
def test_wrong_sizes_are_corrupt(level: int) -> None:
    for kind, array in samples():
        layout = layout_of(kind, array)
        packed = np.zeros(largest_bytes(layout) + 100, np.uint8)
        size = pack(layout, array.ctypes.data, packed.ctypes.data, packed.size, level=level)
        target = np.full(array.nbytes, GUARD, np.uint8)
        for wrong in {0, 1, 15, 16, size - 1, size + 1, size + 64} - {size}:
            with pytest.raises(CorruptPackingError):
                unpack(layout, packed.ctypes.data, wrong, target.ctypes.data, level=level)
        assert (target == GUARD).all(), "nothing is written before the sizes agree"


@built
@each_level
def test_contradicting_flags_and_headers_are_corrupt(level: int) -> None:
    array = np.arange(100, dtype=np.uint32)
    layout, packed = layout_of(Codec.BITMAP, array), np.zeros(1000, np.uint8)
    size = pack(layout, array.ctypes.data, packed.ctypes.data, packed.size, level=level)
    target = np.zeros(400, np.uint8)
    for byte, mask in ((0, 1), (3, 0x80), (15, 0x80)):  # the last one is a flag behind item 99
        packed[byte] ^= mask
        with pytest.raises(CorruptPackingError):
            unpack(layout, packed.ctypes.data, size, target.ctypes.data, level=level)
        packed[byte] ^= mask
    numbers = np.arange(100)
    layout = layout_of(Codec.NARROW, numbers)
    size = pack(layout, numbers.ctypes.data, packed.ctypes.data, packed.size, level=level)
    for width in (0, 2, 3, 255):
        packed[8] = width
        with pytest.raises(CorruptPackingError):
            unpack(layout, packed.ctypes.data, size, target.ctypes.data, level=level)
    flags = np.array([1, 0, 8], np.uint8)  # 10 booleans take two bytes, and bit 11 is not one of them
    with pytest.raises(CorruptPackingError):
        unpack(Layout(Codec.BITS, 10), flags.ctypes.data + 1, 2, target.ctypes.data, level=level)


@built
def test_torch_tensors_by_their_address() -> None:
    torch = pytest.importorskip("torch")
    activation = torch.relu(torch.randn(64, 33, 7))
    layout = Layout(Codec.BITMAP, activation.numel(), activation.element_size())
    packed = torch.empty(largest_bytes(layout), dtype=torch.uint8)
    size = pack(layout, activation.data_ptr(), packed.data_ptr(), packed.numel())
    restored = torch.empty_like(activation)
    unpack(layout, packed.data_ptr(), size, restored.data_ptr())
    assert torch.equal(restored.view(torch.int32), activation.view(torch.int32))
    assert size < 0.6 * layout.source_bytes


@built
def test_unknown_levels_are_refused() -> None:
    array = np.zeros(8, np.uint8)
    for level in (-1, codec.best_level() + 1):
        with pytest.raises(PackingError, match="levels 0 to"):
            packed_bytes(Layout(Codec.BITMAP, 8, 1), array.ctypes.data, level=level)


@pytest.mark.parametrize(("count", "item_bytes"), [(-1, 4), (2**48, 4), (5, 3), (5, 0), (5, 16)])
def test_absurd_layouts_are_refused(count: int, item_bytes: int) -> None:
    with pytest.raises(PackingError):
        Layout(Codec.BITMAP, count, item_bytes)


def test_without_the_library_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_library_path", lambda: None)
    codec.loaded_library.cache_clear()
    assert not packing.available()
    with pytest.raises(PackingUnavailableError, match="install a C compiler"):
        codec.best_level()
    monkeypatch.undo()
    codec.loaded_library.cache_clear()


SOURCES = Path(codec.__file__).parent
PROGRAM = Path(__file__).parent / "c" / "levels.c"
COMPILER = shutil.which("cc") or shutil.which("gcc")
WARNINGS = ["-std=gnu11", "-g", "-O2", "-Wall", "-Wextra", "-Wshadow", "-Werror"]


def build_levels(compiler: str, target: Path, *flags: str) -> Path:
    command = [compiler, *WARNINGS, *flags, f"-I{SOURCES}", "-o", str(target), str(PROGRAM)]
    result = subprocess.run([*command, *map(str, sorted(SOURCES.glob("*.c")))], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return target


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_all_levels_stay_inside_their_memory(tmp_path: Path, survived: Survived) -> None:
    flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    program = build_levels(str(COMPILER), tmp_path / "levels", *flags)
    result = subprocess.run([program], capture_output=True, text=True)
    levels = result.stdout.count("level ") + (result.returncode != 0)
    harmed = (result.stderr[-2000:],) if result.returncode else ()
    survived(
        AttackOutcome(
            "ASan + UBSan, packing", levels, levels - len(harmed), harmed, "levels of instructions, all layouts"
        )
    )
    assert levels


@pytest.mark.long
@pytest.mark.skipif(
    not (shutil.which("aarch64-linux-gnu-gcc") and QEMU),
    reason="needs gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user or qemu-user-static",
)
def test_all_levels_on_emulated_arm(tmp_path: Path) -> None:
    program = build_levels("aarch64-linux-gnu-gcc", tmp_path / "levels", "-static")
    result = subprocess.run([str(QEMU), program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "level 1" in result.stdout
