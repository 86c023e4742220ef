"""Products with a mapped weight in blocks: the bits of the whole, a block of it resident, and
the whole where bits differ.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from port_agent import budget
from port_agent.finetuning.quantized import linear  # noqa: F401  # defines its products as operators
from port_agent.intercept.residency.storages import StorageTable
from port_agent.intercept.tiles import products
from port_agent.intercept.tiles.products import (
    STORED,
    MappedProduct,
    MappedProducts,
    ZeroMapping,
    accumulated_bytes,
    gathered_bytes,
    make_writable,
)
from port_planner.exactness import tiles

INNER, COLUMNS, ROWS = 256, 1000, 32
BLOCK_BYTES = 64 << 10
LIMIT_BYTES = 128 << 10
MIB = 1 << 20


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def head(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """A weight of [COLUMNS, INNER] as `nn.Linear` has it, in a file."""
    monkeypatch.setattr(products, "BLOCK_BYTES", BLOCK_BYTES)
    torch.manual_seed(0)
    save_file({"head": torch.randn(COLUMNS, INNER).to(request.param)}, tmp_path / "model.safetensors")
    return load_file(tmp_path / "model.safetensors")["head"]


@pytest.fixture(autouse=True)
def _nothing_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


asked_for: list[int] = []
"""Room for comparisons."""


def product_of(table: StorageTable, func: Any, args: tuple[Any, ...], limit_bytes: int) -> MappedProduct | None:
    """Return the product that runs in blocks, compared."""
    found = MappedProducts(table, asked_for.append)
    product = found.of(func, args, {}, limit_bytes)
    return product if product is not None and found.has_bits_of_whole(product) else None


CALLS: dict[str, Callable[[torch.Tensor], tuple[Any, tuple[torch.Tensor, ...]]]] = {
    "forward": lambda head: (torch.ops.aten.mm.default, (torch.randn(ROWS, INNER).to(head.dtype), head.t())),
    "backward": lambda head: (torch.ops.aten.mm.default, (torch.randn(ROWS, COLUMNS).to(head.dtype), head)),
    "bias": lambda head: (
        torch.ops.aten.addmm.default,
        (torch.randn(COLUMNS).to(head.dtype), torch.randn(ROWS, INNER).to(head.dtype), head.t()),
    ),
    "bias of rows": lambda head: (
        torch.ops.aten.addmm.default,
        (torch.randn(ROWS, 1).to(head.dtype), torch.randn(ROWS, INNER).to(head.dtype), head.t()),
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_blocks_have_the_bits_of_the_whole(head: torch.Tensor, call: str) -> None:
    func, args = CALLS[call](head)
    table = StorageTable(1 << 10)
    table.of(head)
    product = product_of(table, func, args, LIMIT_BYTES)
    if (
        product is None
    ):  # this machine's kernel has other bits in blocks: then it is run whole, which is what is promised
        pytest.skip("blocks of this product differ from the whole here")
    assert product.weight.shape[1] >= 2 * product.step
    assert torch.equal(product.run(), func(*args))


@pytest.mark.parametrize("name", ["grid_linear", "grid_input_gradient", "grid_addmm_input_gradient"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_weight_in_16_bits_is_widened_block_by_block(
    name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "BLOCK_BYTES", BLOCK_BYTES)
    save_file({"head": torch.randn(COLUMNS, INNER).to(dtype)}, tmp_path / "model.safetensors")
    head = load_file(tmp_path / "model.safetensors")["head"]
    weight = head.t() if name == "grid_linear" or name.startswith("grid_addmm") else head
    operand = torch.randn(ROWS, weight.shape[0])
    table = StorageTable(1 << 10)
    table.of(head)
    func = getattr(torch.ops.port_agent, name).default
    args = (operand, head, torch.empty(0), None, STORED, torch.float32)
    product = product_of(table, func, args, LIMIT_BYTES)
    if product is None:
        pytest.skip("blocks of this product differ from the whole here")
    assert torch.equal(product.run(), torch.mm(operand, weight.float()))
    assert product.need_bytes < ROWS * (weight.shape[1] + product.step) * 4 + head.numel() * torch.float32.itemsize
    assert product_of(table, func, (*args[:3], torch.ones(weight.shape[1]), *args[4:]), LIMIT_BYTES) is None


def test_a_weight_that_fits_or_is_no_file_runs_whole(head: torch.Tensor) -> None:
    table = StorageTable(1 << 10)
    x = torch.randn(ROWS, INNER).to(head.dtype)
    copy = head.clone()
    for weight, limit in ((head, 100 << 20), (copy, LIMIT_BYTES)):
        table.of(weight)
        assert product_of(table, torch.ops.aten.mm.default, (x, weight.t()), limit) is None


@pytest.mark.parametrize("call", ["forward", "backward"])
def test_a_weight_for_which_others_would_be_written_runs_in_blocks(head: torch.Tensor, call: str) -> None:
    func, args = CALLS[call](head)
    limit_bytes = 20 * head.nbytes
    for others_bytes, in_blocks in ((0, False), (limit_bytes - head.nbytes // 2, True)):
        table = StorageTable(1 << 10)
        table.of(head)
        others = torch.empty(others_bytes, dtype=torch.uint8)
        table.of(others)
        product = product_of(table, func, args, limit_bytes)
        if in_blocks and product is None:
            pytest.skip("blocks of this product differ from the whole here")
        assert (product is not None) == in_blocks
        if product is not None:
            assert product.mapped_bytes <= 2 * BLOCK_BYTES < head.nbytes  # the last block may be that much wider


def test_a_weight_smaller_than_a_block_runs_in_two(head: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "BLOCK_BYTES", 2 * head.nbytes)
    func, args = CALLS["forward"](head)
    table = StorageTable(1 << 10)
    table.of(head)
    product = product_of(table, func, args, head.nbytes)
    if product is None:
        pytest.skip("blocks of this product differ from the whole here")
    assert 2 * product.step <= COLUMNS < 4 * product.step


def test_what_differs_in_blocks_runs_whole(head: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = products._computed_blocks
    monkeypatch.setattr(
        products, "_computed_blocks", lambda *args: ((start, stop, block + 1) for start, stop, block in blocks(*args))
    )
    asked_for.clear()
    table = StorageTable(1 << 10)
    table.of(head)
    x = torch.randn(ROWS, INNER).to(head.dtype)
    for _ in range(2):  # the second time as the next process does
        assert product_of(table, torch.ops.aten.mm.default, (x, head.t()), LIMIT_BYTES) is None
    assert len(asked_for) == 1 and asked_for[0] > ROWS * COLUMNS * head.element_size()


def test_without_room_to_compare_a_product_runs_whole_this_time(
    head: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = StorageTable(1 << 10)
    table.of(head)
    call = torch.ops.aten.mm.default, (torch.randn(ROWS, INNER).to(head.dtype), head.t())
    compared = products._equal_in_blocks

    def no_room(product: MappedProduct) -> bool:
        raise OSError

    monkeypatch.setattr(products, "_equal_in_blocks", no_room)
    assert product_of(table, *call, LIMIT_BYTES) is None
    monkeypatch.setattr(products, "_equal_in_blocks", compared)
    asked_for.clear()
    product_of(table, *call, LIMIT_BYTES)
    assert len(asked_for) == 1


def test_a_followed_head_is_never_resident(head: torch.Tensor, tmp_path: Path) -> None:
    def step() -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(1)
        x = torch.randn(ROWS, INNER).to(head.dtype).requires_grad_()
        loss = torch.nn.functional.linear(x, head).float().logsumexp(1).sum()
        loss.backward()
        assert x.grad is not None
        return loss.detach(), x.grad

    expected = step()
    with budget(tensors=LIMIT_BYTES, page_dir=tmp_path).resizing() as b:
        found = step()
        mapped_bytes = b.report.mapped_bytes
    assert all(torch.equal(a, e) for a, e in zip(found, expected, strict=True))
    assert mapped_bytes in (0, head.nbytes, 2 * head.nbytes)  # whole only where the kernel's bits differ in blocks


def test_zeros_take_no_ram_until_they_are_written() -> None:
    zeros = ZeroMapping(1 << 20)
    flat = zeros.tensor(16, torch.float32)
    part = flat[1000:2000]
    make_writable(part)
    part.fill_(1)
    assert flat.sum() == len(part)
    zeros.close()


@pytest.mark.parametrize("call", [*CALLS, "transposed", "repeated"])
def test_it_is_compared_with_sums_that_cancel(call: str, head: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the operand holds and however it lies: of numbers about 1 the results are what rounding left."""
    mm = torch.ops.aten.mm.default
    calls = {
        **CALLS,
        "transposed": lambda head: (mm, (torch.zeros(COLUMNS, ROWS).to(head.dtype).t(), head)),
        "repeated": lambda head: (mm, (torch.ones(1).to(head.dtype).expand(ROWS, COLUMNS), head)),
    }
    seen = list[torch.Tensor]()
    monkeypatch.setattr(tiles, "same_bits", lambda whole, block: bool(seen.append(whole.float().abs()) or True))
    table = StorageTable(1 << 10)
    table.of(head)
    product = product_of(table, *calls[call](head), LIMIT_BYTES)
    assert product is not None
    assert 0 < max(float(block.max()) for block in seen) < 1e-3


def test_a_sparse_factor_is_no_weight_of_a_file(tmp_path: Path) -> None:
    def gradient() -> torch.Tensor:
        torch.manual_seed(0)
        a, b = torch.randn(5, 5, requires_grad=True), torch.randn(5, 5)
        mask = torch.eye(5).to_sparse_csr().requires_grad_()
        torch.sparse.sampled_addmm(mask, a, b).to_dense().sum().backward()
        assert a.grad is not None
        return a.grad

    expected = gradient()
    with budget(tensors="64M", page_dir=tmp_path).resizing():
        assert torch.equal(gradient(), expected)


@pytest.mark.parametrize("beside", [0, 4])
def test_sums_in_32_bits_are_counted_where_they_were_measured(beside: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "sums_bytes", lambda dtype: beside if dtype is torch.bfloat16 else 0)
    assert accumulated_bytes(256, 1000, torch.bfloat16) == 256 * 1000 * beside
    assert accumulated_bytes(256, 1000, torch.float32) == 0


def test_of_a_long_table_64_columns_are_gathered_of_a_short_one_as_many_as_make_a_block() -> None:
    assert gathered_bytes(torch.empty(151_936, 896, dtype=torch.bfloat16, device="meta")) == 64 * 151_936 * 2 + 6 * MIB
    assert gathered_bytes(torch.empty(1000, 896, device="meta")) == 2 * products.BLOCK_BYTES + 6 * MIB
