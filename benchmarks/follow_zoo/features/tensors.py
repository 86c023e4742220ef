"""Tensors that are not plain strided ones, and programs that look at or replace their memory."""

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.follow_zoo.compare import state, training_begins
from benchmarks.follow_zoo.features.registry import Features, classify, learn, perceptron, rows, square

FEATURES = Features("tensors")


@FEATURES.add
def sparse_matrix_product() -> Any:
    sparse = (torch.rand(64, 32) * (torch.rand(64, 32) > 0.8)).to_sparse()
    return learn(nn.Linear(16, 32), lambda m: square(torch.sparse.mm(sparse, m(rows(16, 32)))))


@FEATURES.add
def sparse_compressed_product() -> Any:
    sparse = (torch.rand(64, 32) * (torch.rand(64, 32) > 0.8)).to_sparse_csr()
    return learn(nn.Linear(16, 32), lambda m: square(sparse @ m(rows(16, 32))))


@FEATURES.add
def sparse_gradients_by_hand() -> Any:
    words = nn.Embedding(300, 32, sparse=True)
    training_begins()
    for _ in range(4):
        square(words(torch.randint(0, 300, (40,)))).backward()
        grad = words.weight.grad.coalesce()
        with torch.no_grad():
            words.weight.index_add_(0, grad.indices()[0], grad.values(), alpha=-0.1)
        words.weight.grad = None
    return state(words)


@FEATURES.add
def sparse_message_passing() -> Any:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 8)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            near = torch.sparse_coo_tensor(edges, torch.ones(edges.shape[1]), (60, 60)).coalesce()
            return self.second(torch.sparse.mm(near, self.first(x).relu()))

    return learn(Graph(), lambda m: square(m(torch.randn(60, 32), torch.randint(0, 60, (2, 200)))))


@FEATURES.add
def nested_rows() -> Any:
    def loss(m: nn.Module) -> Tensor:
        nested = torch.nested.nested_tensor([torch.randn(n, 32) for n in (3, 9, 5)], layout=torch.jagged)
        return square(m(nested).values())

    return learn(nn.Sequential(nn.Linear(32, 32), nn.ReLU()), loss)


@FEATURES.add
def nested_padded() -> Any:
    def loss(m: nn.Module) -> Tensor:
        nested = torch.nested.nested_tensor([torch.randn(n, 32) for n in (3, 9, 5)])
        return square(torch.nested.to_padded_tensor(m(nested), 0.0))

    return learn(nn.Linear(32, 32), loss)


@FEATURES.add
def channels_last() -> Any:
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3))
    model = model.to(memory_format=torch.channels_last)
    return learn(model, lambda m: square(m(torch.randn(4, 8, 10, 10).to(memory_format=torch.channels_last))))


@FEATURES.add
def mkldnn_layout() -> Any:
    model, seen = nn.Conv2d(8, 8, 3), []

    def evaluate(step: int) -> None:
        with torch.no_grad():
            seen.append(model(torch.randn(2, 8, 8, 8)).to_mkldnn().relu().to_dense())

    return learn(model, lambda m: square(m(torch.randn(2, 8, 8, 8))), after=evaluate), seen


@FEATURES.add
def quantized_for_evaluation() -> Any:
    model, seen = perceptron(), []

    def evaluate(step: int) -> None:
        q = torch.quantize_per_tensor(model[0].weight.detach(), 0.01, 0, torch.qint8)
        seen.extend([q.dequantize(), q.int_repr()])

    return learn(model, classify, after=evaluate), seen


class _Marked(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


@FEATURES.add
def tensor_subclass() -> Any:
    return learn(perceptron(), lambda m: square(m(rows().as_subclass(_Marked)).as_subclass(Tensor)))


class _Pair(Tensor):
    """Two halves of a tensor in one object, taken apart at each operator."""

    @staticmethod
    def __new__(cls, left: Tensor, right: Tensor) -> "_Pair":
        return Tensor._make_wrapper_subclass(cls, (left.shape[0], left.shape[1] * 2), dtype=left.dtype)

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left, self.right = left, right

    def __tensor_flatten__(self) -> Any:
        return ["left", "right"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> "_Pair":
        return _Pair(inner["left"], inner["right"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        whole = [torch.cat([a.left, a.right], 1) if isinstance(a, _Pair) else a for a in args]
        return func(*whole, **(kwargs or {}))


@FEATURES.add
def wrapper_subclass() -> Any:
    return learn(perceptron(), lambda m: square(m(_Pair(rows(16), rows(16)) * 2)))


@FEATURES.add
def storages_exchanged() -> Any:
    model = perceptron()

    def change(step: int) -> None:
        other = torch.randn_like(model[0].weight)
        with torch.no_grad():
            model[0].weight.set_(other.untyped_storage(), 0, other.shape, other.stride())

    return learn(model, classify, after=change)


@FEATURES.add
def data_exchanged() -> Any:
    model = perceptron()

    def change(step: int) -> None:
        model[0].weight.data = model[0].weight.data * 0.9
        model[3].bias.data = torch.randn(8)

    return learn(model, classify, after=change)


@FEATURES.add
def resized_by_the_program() -> Any:
    scratch, seen = torch.empty(0), []
    model = perceptron()

    def change(step: int) -> None:
        scratch.resize_(10 * (step + 1), 32).fill_(step)
        with torch.no_grad():
            seen.append(model(scratch).sum())

    return learn(model, lambda m: classify(m), after=change), seen, scratch


@FEATURES.add
def freed_and_filled_again_by_the_program() -> Any:
    model, kept = perceptron(), torch.randn(64, 64)

    def change(step: int) -> None:
        values = kept.clone()
        kept.untyped_storage().resize_(0)
        kept.untyped_storage().resize_(64 * 64 * 4)
        kept.copy_(values + 1)

    return learn(model, classify, after=change), kept


@FEATURES.add
def views_of_one_storage() -> Any:
    whole = torch.randn(4, 64, 32)
    parts = [nn.Parameter(part) for part in whole.unbind(0)]
    model = nn.ParameterList(parts)
    return learn(model, lambda m: square(rows() @ (m[0] + m[1] + m[2] + m[3]).T)), whole


@FEATURES.add
def bits_reinterpreted() -> Any:
    model, seen = perceptron(), []

    def look(step: int) -> None:
        seen.append(model[0].weight.detach().view(torch.int32).bitwise_and(0xFFFF).sum())
        model[0].weight.data.view(torch.uint8)[:, ::4].bitwise_or_(1)

    return learn(model, classify, after=look), seen


@FEATURES.add
def signs_and_conjugates() -> Any:
    weight = nn.Parameter(torch.randn(32, 32, dtype=torch.complex64))
    return learn(nn.ParameterList([weight]), lambda m: square((m[0].conj().T @ m[0]).imag.neg() + m[0].real))


@FEATURES.add
def empty_and_scalar_tensors() -> Any:
    model = nn.ParameterList([torch.randn(()), torch.randn(0, 4), torch.randn(40, 40)])
    return learn(model, lambda m: m[0] * m[2].sum() + m[1].sum())


@FEATURES.add
def quantities_kept_in_a_list_of_tensors() -> Any:
    model, history = perceptron(), []

    def loss(m: nn.Module) -> Tensor:
        out = m(rows())
        history.append(out.detach())
        past = torch.stack(history[-3:]).mean(0)
        return (out - past).square().mean() + square(out)

    return learn(model, loss), history


@FEATURES.add
def replay_memory_indexed_at_random() -> Any:
    model, memory = perceptron(), torch.zeros(400, 32)

    def loss(m: nn.Module) -> Tensor:
        memory[torch.randint(0, 400, (20,))] = torch.randn(20, 32)
        return square(m(memory[torch.randint(0, 400, (16,))]))

    return learn(model, loss), memory


@FEATURES.add
def generators_of_ones_own() -> Any:
    one, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)

    def loss(m: nn.Module) -> Tensor:
        keep = torch.rand(16, 32, generator=other) > 0.2
        return square(m(torch.randn(16, 32, generator=one) * keep))

    return learn(perceptron(), loss), one.get_state(), other.get_state()


@FEATURES.add
def random_state_saved_and_restored() -> Any:
    def loss(m: nn.Module) -> Tensor:
        before = torch.get_rng_state()
        first = m(rows())
        torch.set_rng_state(before)
        with torch.random.fork_rng():
            torch.manual_seed(5)
            noise = rows(8)
        return square(first - m(rows()) + noise)

    return learn(perceptron(), loss)


class _Wrapped(Tensor):
    """A tensor around another one, as quantizing libraries make them, without `__tensor_flatten__`."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        made = Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def opened(value: Any) -> Any:
            return value.inner if isinstance(value, _Wrapped) else value

        tree_map = torch.utils._pytree.tree_map
        made = func(*tree_map(opened, args), **tree_map(opened, kwargs or {}))
        return tree_map(lambda value: _Wrapped(value) if isinstance(value, Tensor) else value, made)


@FEATURES.add
def subclass_around_a_tensor() -> Any:
    weight = nn.Parameter(_Wrapped(torch.randn(128, 128)))
    training_begins()
    losses = []
    for _ in range(4):
        loss = (torch.randn(64, 128) @ weight).tanh().square().mean()
        loss.backward()
        losses.append(loss.detach().inner)
        with torch.no_grad():
            weight.sub_(weight.grad, alpha=0.1)
        weight.grad = None
    return losses, weight.data.inner
