"""What a call reads, writes and makes."""

import contextlib
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from port_agent.intercept.dispatch.traits import traits_of
from port_agent.intercept.residency import operands
from port_agent.intercept.residency.storages import StorageTable

ATEN = torch.ops.aten


def table() -> StorageTable:
    return StorageTable(256)


def test_storages_are_found_in_lists_and_in_sparse_tensors() -> None:
    known, dense = table(), torch.ones(64, 64)
    found = operands.storages_in((1, [dense, dense[3:]], dense.to_sparse(), dense.to_sparse_csr()), known)
    assert found[0] is found[1]
    assert len({s.number for s in found}) == 1 + 2 + 2, "the pointers of CSR are small integers"
    assert all(s.resident for s in found)


def test_small_tensors_and_other_devices_stay() -> None:
    assert operands.storages_in((torch.ones(4), torch.ones(99, 99, device="meta"), None), table()) == []


def test_what_is_written_includes_what_no_schema_says() -> None:
    names = [name for _, name in operands.written_arguments(ATEN.native_batch_norm.default)]
    assert names == ["running_mean", "running_var"]
    assert [name for _, name in operands.written_arguments(ATEN.add_.Tensor)] == ["self"]
    assert operands.written_arguments(ATEN.add.Tensor) == ()
    known, a, b = table(), torch.ones(99), torch.ones(99)
    operands.storages_in((a, b), known)
    assert operands.written_storages(ATEN.add.out, (a, a), {"out": b}, known) == [known.known(b)]


def test_shapes_alone_are_read_by_some() -> None:
    assert traits_of(ATEN.zeros_like.default).reads_nothing and not traits_of(ATEN.mul.Tensor).reads_nothing
    assert operands.makes_storage(ATEN.mul.Tensor) and not operands.makes_storage(ATEN.view.default)


SHAPE_ALONE: list[tuple[Any, Any]] = [
    (lambda x: torch.nn.functional.nll_loss(x, torch.tensor([1, 2])), (2, 9)),
    (lambda x: torch.nn.functional.nll_loss(x, torch.tensor([[[1, 2]]])), (1, 9, 1, 2)),
    (lambda x: torch.nn.functional.max_pool2d(x, 2), (2, 3, 8, 8)),
    (lambda x: torch.nn.functional.max_pool2d(x.contiguous(memory_format=torch.channels_last), 3, 2, 1), (2, 3, 9, 9)),
    (lambda x: torch.nn.functional.avg_pool2d(x, 2), (2, 3, 8, 8)),
    (lambda x: torch.nn.functional.adaptive_avg_pool2d(x, 3), (2, 3, 8, 8)),
]


@pytest.mark.parametrize(("function", "shape"), SHAPE_ALONE)
def test_an_operand_whose_shape_alone_is_looked_at_may_have_no_memory(function: Any, shape: tuple[int, ...]) -> None:
    """Autograd saved it; its memory is given up before the gradient is computed."""
    seen: list[str] = []

    class Emptying(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if (place := traits_of(func).shape_alone) is not None:
                seen.append(func._schema.name)
                args[place].untyped_storage().resize_(0)
            return func(*args, **(kwargs or {}))

    def gradient(mode: contextlib.AbstractContextManager[Any]) -> torch.Tensor:
        torch.manual_seed(0)
        leaf = torch.randn(shape, requires_grad=True)
        result = function(leaf.clone())
        with mode:
            (found,) = torch.autograd.grad(result, leaf, torch.ones_like(result))
        return found

    assert torch.equal(gradient(contextlib.nullcontext()), gradient(Emptying())) and len(seen) == 1


def test_results_are_foreseen_where_a_meta_kernel_tells() -> None:
    x = torch.ones(8, 16)
    assert operands.result_bytes(ATEN.mm.default, (x, torch.ones(16, 4)), {}) == 8 * 4 * 4
    assert (
        operands.result_bytes(ATEN.native_layer_norm.default, (x, [16], None, None, 1e-5), {}) == 8 * 16 * 4 + 2 * 8 * 4
    )
    assert operands.result_bytes(ATEN.view.default, (x, [128]), {}) == 0
    assert operands.result_bytes(ATEN.nonzero.default, (x,), {}) is None


def test_what_is_foreseen_without_a_meta_kernel_is_what_is_made() -> None:
    x, column, half = torch.rand(8, 16), torch.rand(8, 1), torch.rand(4, 1, 16).to(torch.bfloat16)
    scalar = torch.tensor(2.0, dtype=torch.float64)
    cases = [
        (ATEN.mul.Tensor, (x, column)), (ATEN.mul.Tensor, (half, torch.rand(3, 1).to(torch.bfloat16))),
        (ATEN.mul.Tensor, (x, scalar)), (ATEN.mul.Tensor, (half, x)), (ATEN.add.Tensor, (torch.arange(9), 1)),
        (ATEN.div.Tensor, (torch.arange(9), 2)), (ATEN.pow.Scalar, (2.0, x)), (ATEN.rsqrt.default, (x,)),
        (ATEN.add.Tensor, (torch.rand(0, 4), torch.rand(1, 4))), (ATEN.clone.default, (column.expand(8, 16),)),
        (ATEN.mm.default, (x, torch.rand(16, 5))), (ATEN.addmm.default, (torch.rand(5), x, torch.rand(16, 5))),
        (ATEN.bmm.default, (half, torch.rand(4, 16, 7).to(torch.bfloat16))),
        (ATEN.addcmul.default, (x, column, x)), (ATEN.threshold_backward.default, (x, x, 0)),
    ]  # fmt: skip
    for func, args in cases:
        made = func(*args)
        assert operands.result_bytes(func, args, {}) == made.numel() * made.element_size(), (func, args)


def test_what_takes_no_memory_here_is_foreseen_as_nothing() -> None:
    assert operands.result_bytes(ATEN.empty.memory_format, ([1 << 20],), {"device": torch.device("meta")}) == 0
    assert operands.result_bytes(ATEN._unsafe_view.default, (torch.rand(4, 6), [24]), {}) == 0


def test_views_are_told_from_what_reads_or_may_copy() -> None:
    views = (ATEN._unsafe_view, ATEN.view, ATEN.t, ATEN.detach, ATEN.split.Tensor, ATEN.as_strided, ATEN.lift_fresh)
    others = (
        ATEN._local_scalar_dense,
        ATEN.equal,
        ATEN.contiguous,
        ATEN.squeeze_,
        ATEN.clone,
        ATEN.set_.source_Storage,
    )
    for packet in (*views, *others):
        func = packet if isinstance(packet, torch._ops.OpOverload) else packet.default
        assert operands.only_views(func) == (packet in views), func


def test_what_is_created_is_foreseen_and_no_random_number_is_drawn() -> None:
    generator = torch.Generator()
    cases: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (ATEN.randn.default, ([3, 4],), {}),
        (ATEN.rand.default, ([3],), {"dtype": torch.float64, "device": torch.device("cpu")}),
        (ATEN.randn.generator, ([5],), {"generator": generator, "device": torch.device("cpu")}),
        (ATEN.randint.low, (2, 9, [6]), {}),
        (ATEN.randint.default, (9, [6]), {"dtype": torch.uint8}),
        (ATEN.zeros.default, ([2, 2],), {"dtype": torch.bool}),
        (ATEN.empty.memory_format, ([7],), {}),
        (ATEN.ones.default, ([],), {}),
        (ATEN.arange.default, (10,), {}),
        (ATEN.full.default, ([3, 3], 7), {}),
    ]
    for func, args, kwargs in cases:
        torch.manual_seed(0)
        before, own = torch.get_rng_state(), generator.get_state()
        found = operands.result_bytes(func, args, kwargs)
        assert torch.equal(before, torch.get_rng_state()) and torch.equal(own, generator.get_state()), func
        assert found == func(*args, **kwargs).nbytes, func
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert operands.result_bytes(ATEN.randperm.default, (9,), {}) is None
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_norms_are_foreseen_without_a_meta_kernel(dtype: torch.dtype) -> None:
    x, weight = torch.rand(4, 6, 8, dtype=dtype), torch.rand(8, dtype=dtype)
    scale = torch.rand(6, dtype=dtype)
    cases: list[tuple[Any, tuple[Any, ...]]] = [
        (ATEN.native_layer_norm.default, (x, [8], weight, weight, 1e-5)),
        (ATEN.native_layer_norm.default, (x, [6, 8], None, None, 1e-5)),
        (ATEN.native_batch_norm.default, (x, scale, scale, scale.clone(), scale.clone(), True, 0.1, 1e-5)),
        (ATEN.native_batch_norm.default, (x, scale, scale, scale, scale, False, 0.1, 1e-5)),
    ]
    _, mean, deviation = ATEN.native_layer_norm.default(x, [8], weight, weight, 1e-5)
    _, channel_mean, channel_deviation = ATEN.native_batch_norm.default(x, scale, scale, None, None, True, 0.1, 1e-5)
    for wanted in ([True, True, True], [True, False, False], [False, True, True]):
        cases += [
            (ATEN.native_layer_norm_backward.default, (x, x, [8], mean, deviation, weight, weight, wanted)),
            (
                ATEN.native_batch_norm_backward.default,
                (x, x, scale, None, None, channel_mean, channel_deviation, True, 1e-5, wanted),
            ),
        ]
    for func, args in cases:
        made = sum(t.nbytes for t in func(*args) if t is not None)
        assert operands.result_bytes(func, args, {}) == made, (func, args[-1])


def test_what_would_load_sympy_is_known_without_its_meta_kernel() -> None:
    x, rows, mask = torch.randn(4, 3, 8), torch.randn(6, 5), torch.ones(3, 1, dtype=torch.bool)
    labels, half = torch.tensor([0, 4, 2, 1, 3, 0]), torch.ones(3, dtype=torch.float16)
    log = ATEN._log_softmax.default(rows, 1, False)
    total = ATEN.nll_loss_forward.default(log, labels, None, 1, -100)[1]
    cases: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (ATEN.empty_like.default, (x.transpose(0, 2),), {}),
        (ATEN.zeros_like.default, (half,), {"dtype": torch.float64}),
        (ATEN.tril.default, (mask,), {}),
        (ATEN.eq.Tensor, (x, x[:1]), {}),
        (ATEN.ne.Scalar, (labels, 0), {}),
        (ATEN.logical_not.default, (mask,), {}),
        (ATEN.where.self, (mask, x, torch.zeros(())), {}),
        (ATEN._softmax.default, (x, 2, False), {}),
        (ATEN._safe_softmax.default, (x, -1), {}),
        (ATEN._log_softmax_backward_data.default, (rows, log, 1, torch.float32), {}),
        (ATEN.embedding_dense_backward.default, (torch.randn(6, 5), labels, 9, -1, False), {}),
        (ATEN.stack.default, ([x, x], 1), {}),
        (ATEN.mean.default, (x,), {}),
        (ATEN.mean.default, (half,), {"dtype": torch.float64}),
        (ATEN.slice_backward.default, (x, [4, 3, 20], 2, 4, 12, 1), {}),
        (ATEN.select_backward.default, (half, [3, 5], 1, 2), {}),
        (ATEN.diagonal_backward.default, (half, [3, 3], 0, 0, 1), {}),
        (ATEN._to_copy.default, (x[1:, :, ::2],), {"dtype": torch.float16}),
        (ATEN.sum.dim_IntList, (x, [0, -1], True), {}),
        (ATEN.sum.dim_IntList, (half, [0]), {"dtype": torch.float64}),
        (ATEN.nll_loss_forward.default, (log, labels, None, 1, -100), {}),
        (ATEN.nll_loss_backward.default, (torch.ones(()), log, labels, None, 1, -100, total), {}),
    ]
    for func, args, kwargs in cases:
        made = func(*args, **kwargs)
        found = sum(t.nbytes for t in (made if isinstance(made, tuple) else (made,)))
        assert operands.known_bytes(func, args, kwargs) == found, func


def test_wrappers_are_told_from_tensors_with_memory() -> None:
    class Around(torch.Tensor):
        @staticmethod
        def __new__(cls, inner: torch.Tensor) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype)

        @classmethod
        def __torch_dispatch__(cls, *_: Any) -> Any:
            raise NotImplementedError

    class Marked(torch.Tensor):
        pass

    plain = torch.ones(8)
    assert operands.is_wrapper(Around(plain))
    assert not any(operands.is_wrapper(t) for t in (plain, torch.nn.Parameter(plain), plain.as_subclass(Marked)))


def test_a_number_is_no_storage() -> None:
    assert not operands.makes_storage(ATEN._local_scalar_dense.default)
    indices, table = torch.tensor([[1, 2, 3]]), torch.ones(10, 8, dtype=torch.bfloat16)
    assert operands.known_bytes(ATEN.embedding.default, (table, indices), {}) == 3 * 8 * 2


def test_of_nested_tensors_nothing_is_foreseen() -> None:
    rows = torch.nested.nested_tensor([torch.ones(3, 8), torch.ones(5, 8)])
    for func, args in ((ATEN.mul.Tensor, (rows, rows)), (ATEN.relu.default, (rows,)), (ATEN.bmm.default, (rows, rows))):
        assert operands.known_bytes(func, args, {}) is None
        assert operands.result_bytes(func, args, {}) is None
