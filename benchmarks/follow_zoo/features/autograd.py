"""Uses of autograd: checkpoints, double backward, custom functions, views written in place."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.follow_zoo.compare import state, training_begins
from benchmarks.follow_zoo.features.registry import Features, classify, learn, perceptron, rows, square, targets

FEATURES = Features("autograd")


class _Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.2)) for _ in range(4))


def _checkpointed(**options: Any) -> Any:
    def loss(m: nn.Module) -> Tensor:
        x = rows().requires_grad_()
        for block in m.blocks:
            x = checkpoint(block, x, **options)
        return square(x)

    return learn(_Deep(), loss)


FEATURES.named("checkpoint_reentrant", partial(_checkpointed, use_reentrant=True))
FEATURES.named("checkpoint", partial(_checkpointed, use_reentrant=False))
FEATURES.named("checkpoint_without_random_state", partial(_checkpointed, use_reentrant=False, preserve_rng_state=False))


@FEATURES.add
def checkpoint_sequences() -> Any:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)])
    return learn(model, lambda m: square(checkpoint_sequential(m, 3, rows().requires_grad_(), use_reentrant=False)))


@FEATURES.add
def checkpoint_nested() -> Any:
    def inner(block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False) * torch.rand_like(x)

    def loss(m: nn.Module) -> Tensor:
        x = rows()
        for block in m.blocks:
            x = checkpoint(inner, block, x, use_reentrant=False)
        return square(x)

    return learn(_Deep(), loss)


@FEATURES.add
def checkpoint_selective() -> Any:
    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = operator is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return _checkpointed(use_reentrant=False, context_fn=contexts)


@FEATURES.add
def gradient_penalty() -> Any:
    def loss(m: nn.Module) -> Tensor:
        x = rows().requires_grad_()
        slope = torch.autograd.grad(m(x).sum(), x, create_graph=True)[0]
        return classify(m) + (slope.norm(dim=1) - 1).square().mean()

    return learn(perceptron(nn.Tanh()), loss)


@FEATURES.add
def hessian_vector_product() -> Any:
    def loss(m: nn.Module) -> Tensor:
        weights = list(m.parameters())
        slopes = torch.autograd.grad(classify(m), weights, create_graph=True)
        return torch.stack([(g * torch.randn_like(g)).sum() for g in slopes]).sum()

    return learn(perceptron(nn.Tanh()), loss)


@FEATURES.add
def learning_to_learn() -> Any:
    def loss(m: nn.Module) -> Tensor:
        fast = dict(m.named_parameters())
        for _ in range(2):
            inner = nn.functional.cross_entropy(torch.func.functional_call(m, fast, (rows(),)), targets())
            slopes = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
            fast = {n: w - 0.1 * g for (n, w), g in zip(fast.items(), slopes, strict=True)}
        return nn.functional.cross_entropy(torch.func.functional_call(m, fast, (rows(),)), targets())

    return learn(perceptron(nn.Tanh()), loss)


@FEATURES.add
def jacobians() -> Any:
    model = perceptron(nn.Tanh())
    return learn(
        model, lambda m: square(torch.func.jacrev(m)(rows(count=2))) + square(torch.func.jacfwd(m)(rows(count=2)))
    )


@FEATURES.add
def hessian() -> Any:
    weights = torch.randn(12, 12)
    return [torch.func.hessian(lambda w: (w @ torch.ones(12)).sin().sum())(weights * k) for k in range(3)]


@FEATURES.add
def forward_mode() -> Any:
    model, slopes = perceptron(nn.Tanh()), []
    for _ in range(3):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(rows(), rows())
            slopes.append(forward_ad.unpack_dual(model(dual)).tangent)
        with torch.no_grad():
            model[0].weight.sub_(0.01 * slopes[-1].mean())
    return slopes, state(model)


class _Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        ctx.save_for_backward(x, w)
        ctx.extra = x.exp()
        return x.clamp(min=0) @ w, x.sign()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, w = ctx.saved_tensors
        return (grads[0] @ w.T) * (x > 0) * ctx.extra, x.clamp(min=0).T @ grads[0]


@FEATURES.add
def custom_function() -> Any:
    model = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32, bias=False)])
    return learn(model, lambda m: square(_Clamped.apply(m[0](rows()), m[1].weight)[0]))


class _Writes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@FEATURES.add
def custom_function_in_place() -> Any:
    return learn(perceptron(), lambda m: square(_Writes.apply(m(rows()) + 1)))


@FEATURES.add
def custom_operator() -> Any:
    with torch.library._scoped_library("zoo", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x + x, "CompositeExplicitAutograd")
        torch.library.register_autograd("zoo::twice", lambda ctx, grad: grad * 2, lib=library)
        return learn(perceptron(), lambda m: square(torch.ops.zoo.twice(m(rows()))))


@FEATURES.add
def graph_kept_for_two_losses() -> Any:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training_begins()
    for _ in range(4):
        out = model(rows())
        out.square().mean().backward(retain_graph=True)
        out.abs().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@FEATURES.add
def gradients_into_chosen_inputs() -> Any:
    model = perceptron()
    training_begins()
    for step in range(4):
        classify(model).backward(inputs=[model[0].weight] if step % 2 else [model[3].weight])
    return state(model)


@FEATURES.add
def written_views() -> Any:
    def loss(m: nn.Module) -> Tensor:
        out = m(rows()).clone()
        out[:, 0] *= 2
        out[3:5].add_(1)
        out.t()[2].zero_()
        out.view(-1)[::3].sigmoid_()
        return square(out)

    return learn(perceptron(), loss)


@FEATURES.add
def buffer_filled_by_rows() -> Any:
    def loss(m: nn.Module) -> Tensor:
        out = torch.empty(16, 8)
        for i, row in enumerate(rows()):
            out[i] = m(row)
        return square(out)

    return learn(perceptron(nn.ReLU()), loss)


@FEATURES.add
def out_arguments() -> Any:
    model, kept = perceptron(), torch.empty(16, 8)

    def evaluate(step: int) -> None:
        with torch.no_grad():
            torch.mul(model(rows()), 2, out=kept)
            torch.add(kept, 1, out=kept)

    return learn(model, classify, after=evaluate), kept


@FEATURES.add
def inference_mode_between_steps() -> Any:
    model, seen = perceptron(), []

    def evaluate(step: int) -> None:
        with torch.inference_mode():
            seen.append(model(rows()).argmax(1))

    return learn(model, classify, after=evaluate), seen


@FEATURES.add
def detached_targets() -> Any:
    def loss(m: nn.Module) -> Tensor:
        out = m(rows())
        return (out - out.detach().roll(1, 0)).square().mean()

    return learn(perceptron(), loss)


@FEATURES.add
def truncated_through_time() -> Any:
    cell, optimizer_state = nn.GRUCell(32, 32), torch.zeros(16, 32)
    optimizer = torch.optim.Adam(cell.parameters())
    training_begins()
    for _ in range(4):
        loss = torch.zeros(())
        for _ in range(3):
            optimizer_state = cell(rows(), optimizer_state)
            loss = loss + optimizer_state.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer_state = optimizer_state.detach()
    return optimizer_state, state(cell)


@FEATURES.add
def graph_that_outlives_steps() -> Any:
    model = perceptron(nn.Tanh())
    outputs = [model(rows()) for _ in range(3)]
    training_begins()
    for out in outputs:
        square(out).backward()
    return state(model)


@FEATURES.add
def backward_that_raises_and_goes_on() -> Any:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refused = 0
    for step in range(4):
        optimizer.zero_grad()
        try:
            out = model(rows())
            if step == 1:
                out = out @ torch.ones(3, 3)
            if step == 2:
                out.register_hook(lambda g: [][0])
            square(out).backward()
            optimizer.step()
        except (RuntimeError, IndexError):
            refused += 1
    return refused, state(model)


@FEATURES.add
def gradcheck() -> Any:
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    return torch.autograd.gradcheck(lambda t: (t @ t).tanh(), (x,))


@FEATURES.add
def accumulated_over_micro_batches() -> Any:
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters())
    training_begins()
    for step in range(9):
        (classify(model) / 3).backward()
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return state(model, optimizer)


@FEATURES.add
def unused_and_frozen_parameters() -> Any:
    model = nn.ModuleDict(
        {"used": perceptron(), "unused": nn.Linear(64, 64), "frozen": nn.Linear(32, 32).requires_grad_(False)}
    )
    return learn(model, lambda m: square(m["used"](m["frozen"](rows()))))


@FEATURES.add
def aot_eager() -> Any:
    model = perceptron(nn.GELU())
    compiled = torch.compile(model, backend="aot_eager")
    return learn(model, lambda m: nn.functional.cross_entropy(compiled(rows()), targets()), steps=2)


@FEATURES.add
def scripted() -> Any:
    model = torch.jit.script(perceptron(nn.Tanh()))
    return learn(model, classify)


@FEATURES.add
def traced() -> Any:
    model = torch.jit.trace(perceptron(nn.Tanh()), rows())
    return learn(model, classify)


@FEATURES.add
def fx_graph() -> Any:
    return learn(torch.fx.symbolic_trace(perceptron(nn.Tanh())), classify)


@FEATURES.add
def exported_between_steps() -> Any:
    model = perceptron(nn.GELU())
    before = learn(model, classify, steps=2)
    program = torch.export.export(model, (rows(),))
    made = program.module()(rows())
    return before, made, [str(node.target) for node in program.graph.nodes], learn(model, classify, steps=2)


@FEATURES.add
def exported_and_trained() -> Any:
    exported = torch.export.export(perceptron(nn.Tanh()), (rows(),)).module()
    return learn(exported, classify)


@FEATURES.add
def graph_of_a_gradient() -> Any:
    model = perceptron(nn.Tanh())
    weight = model[0].weight.detach()
    traced = make_fx(torch.func.grad(lambda w: (rows() @ w.T).tanh().sum()))(weight)
    return traced(weight), learn(model, classify)


@FEATURES.add
def operators_counted() -> Any:
    model = perceptron(nn.Tanh())
    with FlopCounterMode(display=False) as counter:
        ended = learn(model, classify, steps=2)
    return counter.get_total_flops(), ended


@FEATURES.add
def shapes_tried_on_fake_tensors() -> Any:
    model = perceptron(nn.Tanh())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        shape = tuple(model(mode.from_tensor(rows())).shape)
    return shape, learn(model, classify)
