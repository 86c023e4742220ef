"""Weights that are computed from others: parametrizations, pruning, ties, functional calls, adapters."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.utils import parametrizations, parametrize, prune

from benchmarks.follow_zoo.compare import state, training_begins
from benchmarks.follow_zoo.features.registry import Features, classify, learn, perceptron, rows, square, targets

FEATURES = Features("reparametrized")


class _Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).T

    def right_inverse(self, x: Tensor) -> Tensor:
        return x.triu()


def _symmetric(model: nn.Module) -> None:
    parametrize.register_parametrization(model[1], "weight", _Symmetric())


_APPLIED: dict[str, Callable[[nn.Module], object]] = {
    "weight_norm": lambda m: parametrizations.weight_norm(m[0]),
    "spectral_norm": lambda m: parametrizations.spectral_norm(m[0]),
    "orthogonal_householder": lambda m: parametrizations.orthogonal(m[1], orthogonal_map="householder"),
    "orthogonal_exp": lambda m: parametrizations.orthogonal(m[1], orthogonal_map="matrix_exp"),
    "orthogonal_cayley": lambda m: parametrizations.orthogonal(m[1], orthogonal_map="cayley"),
    "symmetric": _symmetric,
    "old_weight_norm": lambda m: nn.utils.weight_norm(m[0]),
    "old_spectral_norm": lambda m: nn.utils.spectral_norm(m[0]),
    "pruned_random": lambda m: prune.random_unstructured(m[0], "weight", 0.5),
    "pruned_magnitude": lambda m: prune.l1_unstructured(m[0], "weight", 0.5),
    "pruned_channels": lambda m: prune.ln_structured(m[0], "weight", 0.3, 2, 0),
}


def _applied(apply: Callable[[nn.Module], object]) -> Any:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 8))
    apply(model)
    return learn(model, classify)


for _name, _apply in _APPLIED.items():
    FEATURES.named(_name, partial(_applied, _apply))


@FEATURES.add
def parametrization_cached_and_removed() -> Any:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 8))
    _symmetric(model)

    def loss(m: nn.Module) -> Tensor:
        with parametrize.cached():
            return classify(m) + classify(m)

    first = learn(model, loss)
    parametrize.remove_parametrizations(model[1], "weight")
    return first, learn(model, classify)


@FEATURES.add
def pruned_more_each_step() -> Any:
    model = perceptron()
    return learn(model, classify, after=lambda step: prune.l1_unstructured(model[0], "weight", 0.2))


@FEATURES.add
def tied_weights() -> Any:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(200, 32), nn.Linear(32, 200, bias=False)
            self.out.weight = self.words.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.words(ids).tanh())

    return learn(
        Tied(), lambda m: nn.functional.cross_entropy(m(torch.randint(0, 200, (40,))), torch.randint(0, 200, (40,)))
    )


@FEATURES.add
def functional_calls() -> Any:
    model = perceptron()
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    optimizer = torch.optim.Adam(weights.values())
    training_begins()
    for _ in range(4):
        nn.functional.cross_entropy(functional_call(model, weights, (rows(),)), targets()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights, state(optimizer)


@FEATURES.add
def ensemble_by_vmap() -> Any:
    members = [perceptron(nn.Tanh()) for _ in range(3)]
    weights, buffers = stack_module_state(members)
    base = members[0]
    optimizer = torch.optim.SGD(weights.values(), lr=0.1)
    training_begins()
    for _ in range(4):
        out = vmap(lambda w, b, x: functional_call(base, (w, b), (x,)), in_dims=(0, 0, None))(weights, buffers, rows())
        square(out).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights


@FEATURES.add
def gradients_of_each_row() -> Any:
    model = perceptron(nn.Tanh())
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}

    def loss(w: Any, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(model, w, (x[None],)), y[None])

    training_begins()
    for _ in range(3):
        each = vmap(grad(loss), in_dims=(None, 0, 0))(weights, rows(), targets())
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
        scale = (1 / norms).clamp(max=1.0)
        weights = {
            n: w - 0.1 * torch.einsum("i,i...->...", scale, each[n]) + 0.01 * torch.randn_like(w)
            for n, w in weights.items()
        }
    return weights


@FEATURES.add
def vmap_with_randomness() -> Any:
    model = perceptron()
    return learn(model, lambda m: square(vmap(m, randomness="different")(torch.randn(5, 4, 32))))


@FEATURES.add
def low_rank_adapters_merged_and_unmerged() -> Any:
    base = nn.Linear(32, 32).requires_grad_(False)
    adapter = nn.ModuleList([nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)])
    holder = nn.ModuleDict({"base": base, "adapter": adapter})
    seen = []

    def merged(step: int) -> None:
        with torch.no_grad():
            change = adapter[1].weight @ adapter[0].weight
            base.weight.add_(change)
            seen.append(base(rows()))
            base.weight.sub_(change)

    return learn(holder, lambda m: square(base(rows()) + adapter[1](adapter[0](rows()))), after=merged), seen


@FEATURES.add
def weights_from_a_hypernetwork() -> Any:
    model = nn.Linear(16, 32 * 32)
    return learn(model, lambda m: square(rows() @ m(torch.randn(16)).view(32, 32)))


@FEATURES.add
def weights_and_gradients_in_one_vector() -> Any:
    model = perceptron(nn.Tanh())
    training_begins()
    for _ in range(4):
        model.zero_grad()
        classify(model).backward()
        vector = nn.utils.parameters_to_vector(model.parameters())
        slope = nn.utils.parameters_to_vector([p.grad for p in model.parameters()])
        nn.utils.vector_to_parameters(vector - 0.1 * slope, model.parameters())
    return state(model)


@FEATURES.add
def lazy_modules() -> Any:
    model = nn.Sequential(nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(8))
    model(torch.randn(4, 3, 8, 8))
    return learn(model, lambda m: square(m(torch.randn(4, 3, 8, 8))))


@FEATURES.add
def made_on_meta_and_filled() -> Any:
    with torch.device("meta"):
        model = perceptron()
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.normal_(p, std=0.1)
    return learn(model, classify)


def _initialised(fill: Callable[[Tensor], Any]) -> Any:
    model = perceptron(nn.Tanh())
    for layer in (model[0], model[2]):
        fill(layer.weight)
    return learn(model, classify, steps=2)


for _name in (
    "xavier_uniform_",
    "xavier_normal_",
    "kaiming_uniform_",
    "kaiming_normal_",
    "orthogonal_",
    "trunc_normal_",
    "eye_",
):
    FEATURES.named(f"init_{_name.strip('_')}", partial(_initialised, getattr(nn.init, _name)))
FEATURES.named("init_sparse", partial(_initialised, lambda w: nn.init.sparse_(w, 0.5)))


@FEATURES.add
def stochastic_depth_and_shared_blocks() -> Any:
    block = nn.Linear(32, 32)
    model = nn.ModuleList([block, nn.Linear(32, 8)])

    def loss(m: nn.Module) -> Tensor:
        x = rows()
        for _ in range(6):
            if torch.rand(()).item() > 0.3:
                x = x + m[0](x).relu()
        return nn.functional.cross_entropy(m[1](x), targets())

    return learn(model, loss)
