"""Recipes: believed only while what they read is what it was."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from port_agent.intercept.decisions.rematerialization import StorageRemat, remat_of, repeatable
from port_agent.intercept.residency.backing import ResizedStorages
from port_agent.intercept.residency.storages import NEVER, Storage, StorageTable, untyped_storage
from port_agent.paging.page_space import PageSpace
from port_agent.paging.pager import Pager

ATEN = torch.ops.aten


@pytest.fixture(scope="module")
def backing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ResizedStorages]:
    """Where nobody writes past the operators without being seen."""
    made = ResizedStorages(PageSpace(tmp_path_factory.mktemp("pages")), Pager())
    yield made
    made.close()


def made(
    backing: ResizedStorages, table: StorageTable, func: Any, *args: Any
) -> tuple[torch.Tensor, Storage, StorageRemat | None]:
    """Run an operator; return its result, the result's record, and how it could be made again."""
    sources = [s for s in (table.of(a) for a in args if isinstance(a, torch.Tensor)) if s is not None]
    result = func(*args)
    record = table.of(result)
    assert record is not None
    record.next_use = 9
    return result, record, remat_of(func, args, {}, sources, record, result, backing, workspace_bytes=0)


def test_what_is_random_or_writes_is_not_repeatable() -> None:
    assert all(repeatable(f) for f in (ATEN.mul.Tensor, ATEN.mm.default, ATEN.native_layer_norm.default))
    drawn = (ATEN.native_dropout.default, ATEN.bernoulli.default, ATEN.rand_like.default, ATEN.empty_like.default)
    assert not any(repeatable(f) for f in (*drawn, ATEN.add_.Tensor, ATEN.native_batch_norm.default, ATEN.view.default))


def test_what_casts_inside_is_not_repeatable() -> None:
    """Made again, outside of the autocast of its time, `bilinear` had other bits."""
    assert not any(repeatable(f) for f in (ATEN._trilinear.default, ATEN._transformer_encoder_layer_fwd.default))


def test_a_recipe_makes_the_same_bytes(backing: ResizedStorages) -> None:
    table, x = StorageTable(256), torch.randn(64, 64)
    result, record, remat = made(backing, table, ATEN.mul.Tensor, x.t(), torch.tensor(3.0))
    assert remat is not None and remat.possible(record)
    again = torch.empty(0).set_(remat.run(), 0, result.size(), result.stride())
    assert torch.equal(again, result)


def test_it_computes_as_its_call_did_whatever_was_set_since(backing: ResizedStorages) -> None:
    table, threads = StorageTable(256), torch.get_num_threads()
    x, weight = torch.randn(8, 16, 40, 40), torch.randn(32, 16, 3, 3)
    arguments = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    torch.set_num_threads(2)
    result, _, remat = made(backing, table, ATEN.convolution.default, x, weight, *arguments)
    torch.set_num_threads(1)
    torch._C._set_mkldnn_enabled(False)
    try:
        other = ATEN.convolution(x, weight, *arguments)
        assert remat is not None and not torch.equal(other, result), "computed by another library"
        again = torch.empty(0).set_(remat.run(), 0, result.size(), result.stride())
        assert torch.equal(again, result)
        assert torch.get_num_threads() == 1 and not torch._C._get_mkldnn_enabled()
    finally:
        torch._C._set_mkldnn_enabled(True)
        torch.set_num_threads(threads)


def test_it_is_void_when_a_source_changes_or_is_gone(backing: ResizedStorages) -> None:
    table, x = StorageTable(256), torch.randn(64, 64)
    _, record, remat = made(backing, table, ATEN.mul.Tensor, x, 2.0)
    assert remat is not None and remat.possible(record)
    source = table.of(x)
    assert source is not None
    source.version += 1
    assert not remat.possible(record)
    source.version -= 1
    held = remat.take_hold(record)
    assert held[0] is untyped_storage(x) and record in (source.dependents or ())
    del held, x
    assert not remat.possible(record)


def test_what_others_may_write_is_never_a_source(backing: ResizedStorages) -> None:
    table, x, y = StorageTable(256), torch.randn(64, 64), torch.randn(64, 64)
    assert table.of(x) is not None
    x.numpy()
    assert made(backing, table, ATEN.mul.Tensor, x, 2.0)[2] is None
    pinned = table.of(y)
    assert pinned is not None
    pinned.pins = 1
    assert made(backing, table, ATEN.mul.Tensor, y, 2.0)[2] is None


def test_what_nobody_else_needs_is_kept_only_where_it_is_much_smaller(backing: ResizedStorages) -> None:
    table, half = StorageTable(256), torch.randn(64, 64).to(torch.bfloat16)
    for func, args, smaller in ((ATEN._to_copy.default, {"dtype": torch.float32}, True), (ATEN.neg.default, {}, False)):
        source = table.of(half)
        assert source is not None
        source.birth, source.next_use = (0, 0, 0), NEVER
        result = func(half, **args)
        record = table.of(result)
        assert record is not None
        record.next_use = 9
        remat = remat_of(func, (half,), args, [source], record, result, backing, workspace_bytes=0)
        assert remat is not None and remat.kept_for(record) == [source]
        assert remat.possible(record) == smaller
        source.next_use = 10
        assert remat.kept_for(record) == [] and remat.possible(record)
        source.next_use = None
        assert not remat.possible(record), "nobody knows how long it would be kept"
