"""Hooks of modules, tensors, autograd nodes and optimizers."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from benchmarks.follow_zoo.compare import state, training_begins
from benchmarks.follow_zoo.features.registry import Features, classify, learn, perceptron, rows, square

FEATURES = Features("hooks")


@FEATURES.add
def forward_output_changed() -> Any:
    model = perceptron()
    model[0].register_forward_hook(lambda m, args, out: out * 1.5 + torch.randn_like(out))
    return learn(model, classify)


@FEATURES.add
def forward_input_changed() -> Any:
    model = perceptron()
    model[0].register_forward_pre_hook(lambda m, args: (args[0] * 0.5,))
    return learn(model, classify)


@FEATURES.add
def activations_kept_across_steps() -> Any:
    model, kept = perceptron(), []
    model[0].register_forward_hook(lambda m, args, out: kept.append(out.detach()))
    return learn(model, classify), kept


@FEATURES.add
def full_backward() -> Any:
    model, kept = perceptron(), []
    model[0].register_full_backward_hook(lambda m, into, out: kept.append(out[0].norm()))
    model[3].register_full_backward_pre_hook(lambda m, out: (out[0] * 2,))
    return learn(model, classify), kept


@FEATURES.add
def tensor_gradient_changed() -> Any:
    model = perceptron()
    model[0].weight.register_hook(lambda g: g + 0.01 * torch.randn_like(g))
    return learn(model, classify)


@FEATURES.add
def retained_gradient_of_activation() -> Any:
    model, kept = perceptron(nn.Tanh()), []

    def loss(m: nn.Module) -> Tensor:
        hidden = m[1](m[0](rows()))
        hidden.retain_grad()
        kept.append(hidden)
        return square(m[2](hidden))

    return learn(model, loss), [h.grad for h in kept], kept


@FEATURES.add
def optimizer_inside_backward() -> Any:
    model = perceptron()
    optimizers = {p: torch.optim.AdamW([p]) for p in model.parameters()}

    def update(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    training_begins()
    for _ in range(4):
        classify(model).backward()
    return state(model, *optimizers.values())


@FEATURES.add
def saved_tensors_halved() -> Any:
    def loss(m: nn.Module) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (t.dtype, t.to(torch.bfloat16)), lambda s: s[1].to(s[0])
        ):
            return square(m(rows()).exp())

    return learn(perceptron(nn.Tanh()), loss)


@FEATURES.add
def saved_on_cpu() -> Any:
    def loss(m: nn.Module) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return square(m(rows()).exp())

    return learn(perceptron(), loss)


@FEATURES.add
def saved_to_files() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        count = iter(range(10**6))

        def pack(t: Tensor) -> Path:
            path = Path(folder) / f"{next(count)}.pt"
            torch.save(t, path)
            return path

        def loss(m: nn.Module) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda path: torch.load(path, weights_only=True)):
                return square(m(rows()).sin())

        return learn(perceptron(nn.Tanh()), loss)


@FEATURES.add
def saved_as_numpy() -> Any:
    def loss(m: nn.Module) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy):
            return square(m(rows()).sin())

    return learn(perceptron(nn.Tanh()), loss)


@FEATURES.add
def autograd_nodes() -> Any:
    kept: list[Any] = []

    def loss(m: nn.Module) -> Tensor:
        out = m(rows())
        out.grad_fn.register_prehook(lambda grads: kept.append(grads[0]))
        out.grad_fn.register_hook(lambda into, grads: kept.append(grads[0]))
        return square(out)

    return learn(perceptron(), loss), kept


@FEATURES.add
def several_gradients_at_once() -> Any:
    kept: list[Any] = []

    def loss(m: nn.Module) -> Tensor:
        hidden, other = m[0](rows()), m[0](rows())
        torch.autograd.graph.register_multi_grad_hook(
            (hidden, other), lambda grads: kept.extend(g.norm() for g in grads)
        )
        return square(m[2](hidden * other))

    return learn(perceptron(nn.Tanh()), loss), kept


@FEATURES.add
def around_optimizer_steps() -> Any:
    model, kept = perceptron(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def clamp(*_: Any) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.15, 0.15)

    optimizer.register_step_pre_hook(lambda *_: kept.append(model[0].weight.grad.norm()))
    optimizer.register_step_post_hook(clamp)
    for _ in range(4):
        classify(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return kept, state(model)


@FEATURES.add
def of_all_modules() -> Any:
    kept: list[Any] = []
    handle = module_hooks.register_module_forward_hook(lambda m, args, out: kept.append(out.detach().sum()))
    try:
        return learn(perceptron(), classify), kept
    finally:
        handle.remove()


@FEATURES.add
def added_and_removed_between_steps() -> Any:
    model, handles = perceptron(), []

    def change(step: int) -> None:
        if step % 2:
            handles.pop().remove()
        else:
            handles.append(model[0].register_forward_hook(lambda m, args, out: out.abs()))

    return learn(model, classify, after=change)


@FEATURES.add
def state_dict_changed() -> Any:
    model = perceptron()
    model.register_state_dict_post_hook(lambda m, found, prefix, meta: found.update(extra=torch.ones(100)))
    model.register_load_state_dict_pre_hook(lambda m, found, *rest: found.pop("extra"))

    def reload(step: int) -> None:
        model.load_state_dict(model.state_dict())

    return learn(model, classify, after=reload)


@FEATURES.add
def gradients_become_views_of_one_buffer() -> Any:
    model = perceptron()
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    start = 0
    for p in model.parameters():
        p.grad = flat[start : start + p.numel()].view_as(p)
        start += p.numel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training_begins()
    for _ in range(4):
        flat.zero_()
        classify(model).backward()
        flat.clamp_(-0.1, 0.1)
        optimizer.step()
    return flat, state(model)


@FEATURES.add
def anomaly_mode() -> Any:
    with torch.autograd.detect_anomaly(check_nan=True):
        return learn(perceptron(), classify)


@FEATURES.add
def profiler_around() -> Any:
    with torch.profiler.profile(record_shapes=True):
        return learn(perceptron(), classify, steps=2)
