"""Optimizers that people write or copy, and that are not part of torch."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


def _lion_update(
    p: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, lr: float, wd: float, beta1: float, beta2: float
) -> None:
    p.data.mul_(1.0 - lr * wd)
    update = exp_avg.clone().mul_(beta1).add(grad, alpha=1.0 - beta1).sign_()
    p.add_(update, alpha=-lr)
    exp_avg.mul_(beta2).add_(grad, alpha=1.0 - beta2)


class Lion(Optimizer):
    """Lion as in lion-pytorch, which hands the update of one parameter to a function."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        self.update_fn: Callable[..., None] = _lion_update

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in filter(lambda p: p.grad is not None, group["params"]):
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                self.update_fn(p, p.grad, state["exp_avg"], group["lr"], group["weight_decay"], *group["betas"])
        return loss


class GoogleLion(Lion):
    """Lion as in google/automl."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                grad = p.grad
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                exp_avg = state["exp_avg"]
                beta1, beta2 = group["betas"]
                update = exp_avg * beta1 + grad * (1 - beta1)
                p.add_(update.sign_(), alpha=-group["lr"])
                exp_avg.mul_(beta2).add_(grad, alpha=1 - beta2)
        return None


class OwnAdamW(Optimizer):
    """AdamW with its count of steps in Python, as before torch kept it in a tensor; its decay skips vectors."""

    def __init__(self, params: Any, lr: float = 1e-3, eps: float = 1e-8) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": eps, "weight_decay": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["m"], state["v"] = torch.zeros_like(p), torch.full_like(p, 1e-6)
                state["step"] += 1
                beta1, beta2 = group["betas"]
                state["m"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
                state["v"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                rate = group["lr"] * math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
                if p.dim() > 1:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                p.addcdiv_(state["m"], state["v"].sqrt().add_(group["eps"]), value=-rate)
        return None


class ScheduleFree(Lion):
    """Steps of a copy of the weights, whose average the weights are, and which is an average itself;
    begun as people begin them.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in filter(lambda p: p.grad is not None, group["params"]):
                state = self.state[p]
                if not state:
                    state["n"], state["z"], state["mean"] = 0, torch.clone(p.data), p.detach().clone()
                state["n"] += 1
                state["z"].sub_(p.grad, alpha=group["lr"])
                p.lerp_(state["z"], 1 / state["n"] ** 0.5)
                state["mean"].mul_(0.9).add_(p, alpha=0.1)
        return None


class CopiedLate(Lion):
    """A copy of the weights once they have changed."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in filter(lambda p: p.grad is not None, self.param_groups[0]["params"]):
            p.sub_(p.grad, alpha=0.1)
            self.state[p].setdefault("mean", p.clone()).lerp_(p, 0.1)
        return None


class OldSgd(Lion):
    """SGD as before torch 0.4: the decay is added to the gradient in place, what changes is `.data`."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.data.add_(p.data, alpha=0.01)
                    p.data.add_(p.grad.data, alpha=-group["lr"])
        return None


class Trusted(Lion):
    """LARS' trust ratio, in tensors: a norm of each weight and gradient scales its own update."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    ratio = p.norm() / (p.grad.norm() + 1e-6)
                    p.sub_(p.grad * ratio.clamp(max=10.0) * group["lr"])
        return None


class Clipped(Lion):
    """A step that reads a norm in Python."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None and p.grad.norm() > 1.0:
                p.sub_(p.grad, alpha=0.1)
        return None


class Together(Lion):
    """A step that scales every gradient by the norm of all."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        given = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        total = torch.stack([p.grad.norm() for p in given]).norm()
        for p in given:
            p.sub_(p.grad / total, alpha=0.1)
        return None


class Lookahead(Lion):
    """Steps of SGD, and every fifth goes back half the way."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.count = getattr(self, "count", 0) + 1
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                slow = self.state[p].setdefault("slow", torch.zeros_like(p))
                p.sub_(p.grad, alpha=0.1)
                if self.count % 5 == 0:
                    slow.lerp_(p, 0.5)
                    p.copy_(slow)
        return None


class CountsParameters(Lion):
    """A rate that falls with the number of tensors that were updated."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.count = getattr(self, "count", 0) + 1
                p.sub_(p.grad, alpha=0.5 ** (self.count // 1000))
        return None


class Replaced(Lion):
    """State that is another tensor after each step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                state = self.state[p]
                state["m"] = state.get("m", torch.zeros_like(p)) * 0.9 + p.grad
                p.sub_(state["m"], alpha=0.1)
        return None


class Exchanged(Lion):
    """Parameters whose data are replaced."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.data = p.data - 0.1 * p.grad
        return None


class Noisy(Lion):
    """Langevin dynamics."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(p.grad + torch.randn_like(p), alpha=0.1)
        return None


class Hidden(Lion):
    """A learning rate that hides in a tensor and changes."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.rate = getattr(self, "rate", 0.1) / 2
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(p.grad * torch.tensor(self.rate))
        return None


class OwnMomentum(torch.optim.SGD):
    """A subclass of torch's."""
