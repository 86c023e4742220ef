"""Losses that people write."""

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributions import Beta, Categorical, Normal
from torch.nn import functional

from benchmarks.follow_zoo.stranger_jobs.making import (
    CLASSES,
    ROWS,
    WIDTH,
    Jobs,
    classify,
    job,
    perceptron,
    rows,
    targets,
)
from port_planner.job import TrainingJob

JOBS = Jobs("losses")


def _focal(z: Tensor, y: Tensor) -> Tensor:
    each = functional.cross_entropy(z, y, reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).mean()


def _dice(z: Tensor, y: Tensor) -> Tensor:
    p, t = z.softmax(1), functional.one_hot(y, CLASSES).float()
    return 1 - (2 * (p * t).sum(0) / ((p + t).sum(0) + 1e-6)).mean()


def _arcface(z: Tensor, y: Tensor) -> Tensor:
    angles = functional.normalize(z).clamp(-0.999, 0.999).acos()
    return functional.cross_entropy(16 * (angles + 0.3 * functional.one_hot(y, CLASSES)).cos(), y)


def _contrastive(z: Tensor, y: Tensor) -> Tensor:
    z = functional.normalize(z)
    near = (z @ z.T / 0.2) - 1e9 * torch.eye(len(z))
    same = (y[:, None] == y[None]).float() - torch.eye(len(z))
    return -((near.log_softmax(1) * same).sum(1) / same.sum(1).clamp(min=1)).mean()


def _triplet(z: Tensor, y: Tensor) -> Tensor:
    return functional.triplet_margin_loss(z, z.roll(1, 0), z.roll(2, 0), margin=0.5)


def _quantile(z: Tensor, y: Tensor) -> Tensor:
    error = y[:, None].float() - z
    q = torch.linspace(0.1, 0.9, CLASSES)
    return torch.maximum(q * error, (q - 1) * error).mean()


def _gaussian(z: Tensor, y: Tensor) -> Tensor:
    return functional.gaussian_nll_loss(z[:, 0], y.float(), functional.softplus(z[:, 1]) + 1e-3)


def _hinge(z: Tensor, y: Tensor) -> Tensor:
    return functional.multi_margin_loss(z, y)


def _sinkhorn(z: Tensor, y: Tensor) -> Tensor:
    cost = torch.cdist(z, functional.one_hot(y, CLASSES).float())
    u = v = torch.zeros(len(z))
    for _ in range(5):
        u = -torch.logsumexp(v - cost, 1)
        v = -torch.logsumexp(u[:, None] - cost, 0)
    return ((u[:, None] + v - cost).exp() * cost).sum()


def _ranked(z: Tensor, y: Tensor) -> Tensor:
    return (z.sort(1, descending=True).values * torch.linspace(1, 0, CLASSES)).mean() + z.topk(2).values.mean()


def _of_a_box(z: Tensor, y: Tensor, area: Callable[[Tensor], Tensor]) -> Tensor:
    a, b = z[:, :4].sigmoid(), functional.one_hot(y, CLASSES)[:, :4].float() * 0.4 + 0.3
    low, high = (
        torch.maximum(a[:, :2] - a[:, 2:] / 2, b[:, :2] - b[:, 2:] / 2),
        torch.minimum(a[:, :2] + a[:, 2:] / 2, b[:, :2] + b[:, 2:] / 2),
    )
    shared = area((high - low).clamp(0))
    return (1 - shared / (area(a[:, 2:]) + area(b[:, 2:]) - shared + 1e-7)).mean()


def _iou(z: Tensor, y: Tensor) -> Tensor:
    return _of_a_box(z, y, lambda sides: sides[:, 0] * sides[:, 1])


def _iou_prod(z: Tensor, y: Tensor) -> Tensor:
    return _of_a_box(z, y, lambda sides: sides.prod(1))


def _variance_of_features(z: Tensor, y: Tensor) -> Tensor:
    centred = z - z.mean(0)
    covariance = centred.T @ centred / (len(z) - 1)
    return (
        functional.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() + (covariance - covariance.diag().diag()).pow(2).sum() / 5
    )


def _log_determinant(z: Tensor, y: Tensor) -> Tensor:
    return -torch.logdet(z.T @ z / len(z) + torch.eye(CLASSES))


def _median(z: Tensor, y: Tensor) -> Tensor:
    return (z - y[:, None]).abs().median(0).values.mean()


def _label_smoothed(z: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(z, y, torch.linspace(0.5, 1.5, CLASSES), label_smoothing=0.1)


def _ordinal(z: Tensor, y: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(z.cumsum(1), (y[:, None] > torch.arange(CLASSES)).float())


_OF_OUTPUT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "focal": _focal, "dice": _dice, "arcface": _arcface, "contrastive": _contrastive, "triplet": _triplet, "quantile": _quantile,
    "gaussian": _gaussian, "hinge": _hinge, "sinkhorn": _sinkhorn, "ranked": _ranked, "iou": _iou, "iou_prod": _iou_prod,
    "variance_of_features": _variance_of_features, "log_determinant": _log_determinant, "median": _median,
    "label_smoothed": _label_smoothed, "ordinal": _ordinal,
}  # fmt: skip


def _of_output(loss: Callable[[Tensor, Tensor], Tensor]) -> TrainingJob:
    return job(perceptron(), lambda m, x, y: loss(m(x), y))


for _name, _loss in _OF_OUTPUT.items():
    JOBS.named(_name, lambda loss=_loss: _of_output(loss))  # type: ignore[misc]


def _recogniser() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 8))


@JOBS.add
def ctc_of_one_length() -> TrainingJob:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        lengths = torch.full((len(x),), 12), torch.full((len(x),), 4)
        return functional.ctc_loss(m(x).log_softmax(2).transpose(0, 1), y, *lengths)

    return job(_recogniser(), loss, (rows(12, 6), torch.randint(1, 8, (ROWS, 4))))


@JOBS.add
def ctc_of_many_lengths() -> TrainingJob:
    def loss(m: nn.Module, x: Tensor, y: Tensor, frames: Tensor, lengths: Tensor) -> Tensor:
        return functional.ctc_loss(
            m(x).log_softmax(2).transpose(0, 1), y, frames, lengths, reduction="sum", zero_infinity=True
        )

    data = (
        rows(12, 6),
        torch.randint(1, 8, (ROWS, 4)),
        torch.randint(9, 13, (ROWS,)),
        torch.randint(1, 5, (ROWS,)),
    )
    return job(_recogniser(), loss, data)


@JOBS.add
def distilled() -> TrainingJob:
    model, teacher = perceptron(), perceptron().requires_grad_(False).eval()

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        z = m(x)
        with torch.no_grad():
            soft = (teacher(x) / 2).softmax(1)
        return functional.kl_div((z / 2).log_softmax(1), soft, reduction="batchmean") + functional.cross_entropy(z, y)

    return job(model, loss)


@JOBS.add
def distilled_in_inference_mode() -> TrainingJob:
    model, teacher = perceptron(), perceptron().requires_grad_(False).eval()

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.inference_mode():
            soft = teacher(x).softmax(1)
        return functional.cross_entropy(m(x), soft.clone())

    return job(model, loss)


@JOBS.add
def mixed_up() -> TrainingJob:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        share, other = torch.rand(()), torch.randperm(len(x))
        z = m(share * x + (1 - share) * x[other])
        return share * functional.cross_entropy(z, y) + (1 - share) * functional.cross_entropy(z, y[other])

    return job(perceptron(), loss)


@JOBS.add
def mixed_up_by_beta() -> TrainingJob:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        share = Beta(0.4, 0.4).sample()
        return functional.cross_entropy(m(share * x + (1 - share) * x.flip(0)), y)

    return job(perceptron(), loss)


@JOBS.add
def variational() -> TrainingJob:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = perceptron(out=8), perceptron(4, WIDTH)

    def loss(m: Model, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = m.encoder(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        error = functional.mse_loss(m.decoder(z), x)
        return error - 0.05 * (1 + log_variance - mean**2 - log_variance.exp()).mean(), error.detach()

    return job(Model(), loss, (rows(WIDTH),))


@JOBS.add
def vector_quantized() -> TrainingJob:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder, self.codes = perceptron(out=4), perceptron(4, WIDTH), nn.Embedding(12, 4)

    def loss(m: Model, x: Tensor) -> Tensor:
        z = m.encoder(x)
        q = m.codes(torch.cdist(z, m.codes.weight).argmin(1))
        commitment = functional.mse_loss(q, z.detach()) + 0.25 * functional.mse_loss(z, q.detach())
        return functional.mse_loss(m.decoder(z + (q - z).detach()), x) + commitment

    return job(Model(), loss, (rows(WIDTH),))


@JOBS.add
def gradient_penalty() -> TrainingJob:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        z = m(x)
        (slope,) = torch.autograd.grad(z.sum(), x, create_graph=True)
        return functional.cross_entropy(z, y) + 0.1 * (slope.norm(dim=1) - 1).pow(2).mean()

    return job(perceptron(), loss)


@JOBS.add
def adversarial_samples() -> TrainingJob:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(functional.cross_entropy(m(x), y), x)
        return functional.cross_entropy(m((x + 0.05 * slope.sign()).detach()), y)

    return job(perceptron(), loss)


@JOBS.add
def physics_informed() -> TrainingJob:
    def loss(m: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        u = m(x)
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        return (second + math.pi**2 * u).pow(2).mean() + (m(torch.zeros(1, 1)) - 1).pow(2).mean()

    return job(perceptron(1, 1), loss, (torch.rand(ROWS, 1),))


@JOBS.add
def one_step_of_an_inner_loop() -> TrainingJob:
    def loss(m: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
        weights = dict(m.named_parameters())
        inner = functional.cross_entropy(m(x[:4]), y[:4])
        slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        adapted = {name: w - 0.1 * s for (name, w), s in zip(weights.items(), slopes, strict=True)}
        return functional.cross_entropy(torch.func.functional_call(m, adapted, (x[4:],)), y[4:])

    return job(perceptron(), loss, drop_last=True)


@JOBS.add
def twice_with_dropout() -> TrainingJob:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        a, b = m(x), m(x)
        apart = functional.kl_div(a.log_softmax(1), b.softmax(1), reduction="batchmean")
        return (functional.cross_entropy(a, y) + functional.cross_entropy(b, y)) / 2 + apart

    return job(nn.Sequential(nn.Dropout(0.3), *perceptron()), loss)


@JOBS.add
def weighted_by_uncertainty() -> TrainingJob:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.log_variances = perceptron(), nn.Parameter(torch.zeros(2))

    def loss(m: Model, x: Tensor, y: Tensor) -> Tensor:
        z = m.body(x)
        both = torch.stack([functional.cross_entropy(z, y), z.pow(2).mean()])
        return ((-m.log_variances).exp() * both + m.log_variances).sum()

    return job(Model(), loss)


@JOBS.add
def policy_gradient() -> TrainingJob:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        actions = Categorical(logits=m(x))
        chosen = actions.sample()
        return -(actions.log_prob(chosen) * (chosen == y).float()).mean() - 0.01 * actions.entropy().mean()

    return job(perceptron(), loss)


@JOBS.add
def clipped_policy() -> TrainingJob:
    def loss(m: nn.Module, x: Tensor, y: Tensor, before: Tensor, advantage: Tensor) -> Tensor:
        ratio = (m(x).log_softmax(1).gather(1, y[:, None])[:, 0] - before).exp()
        return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()

    return job(perceptron(), loss, (rows(WIDTH), targets(), -torch.rand(ROWS), rows()))


@JOBS.add
def slow_target_network() -> TrainingJob:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online = perceptron()
            self.target = copy.deepcopy(self.online).requires_grad_(False)

    def loss(m: Model, x: Tensor, y: Tensor, reward: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(m.target.parameters(), m.online.parameters(), strict=True):
                slow.lerp_(fast, 0.05)
            wanted = reward + 0.9 * m.target(x.roll(1, 1)).max(1).values
        return functional.smooth_l1_loss(m.online(x).gather(1, y[:, None])[:, 0], wanted)

    model = Model()
    return job(model, loss, (rows(WIDTH), targets(), rows()), torch.optim.Adam(model.online.parameters(), 1e-2))


@JOBS.add
def denoising() -> TrainingJob:
    kept = torch.linspace(0.99, 0.1, 50)

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        level = kept[torch.randint(0, 50, (len(x),))][:, None]
        noise = torch.randn_like(x)
        return functional.mse_loss(m(torch.cat([level.sqrt() * x + (1 - level).sqrt() * noise, level], 1)), noise)

    return job(perceptron(WIDTH + 1, WIDTH), loss, (rows(WIDTH),))


@JOBS.add
def flow_matching() -> TrainingJob:
    def loss(m: nn.Module, x: Tensor) -> Tensor:
        noise, t = torch.randn_like(x), torch.rand(len(x), 1)
        return functional.mse_loss(m(torch.cat([noise.lerp(x, t), t], 1)), x - noise)

    return job(perceptron(WIDTH + 1, WIDTH), loss, (rows(WIDTH),))


@JOBS.add
def reparametrized_normal() -> TrainingJob:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        z = m(x)
        return -Normal(z, 1.0).log_prob(Normal(z.roll(1, 0).detach(), 0.5).rsample()).mean()

    return job(perceptron(), loss)


@JOBS.add
def weights_of_the_loss() -> TrainingJob:
    model, centres = perceptron(), nn.Parameter(torch.randn(CLASSES, CLASSES))

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        z = m(x)
        return functional.cross_entropy(z, y) + 0.1 * (z - centres[y]).pow(2).mean()

    return job(model, loss, optimizer=torch.optim.SGD([*model.parameters(), centres], 0.05))


@JOBS.add
def perceptual() -> TrainingJob:
    model, judge = nn.Conv2d(3, 3, 3, padding=1), nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).requires_grad_(False)
    return job(model, lambda m, x: functional.l1_loss(judge(m(x)), judge(x)), (rows(3, 10, 10),))


@JOBS.add
def structural_similarity() -> TrainingJob:
    window = torch.ones(1, 1, 5, 5) / 25

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        z = m(x)
        a, b = (functional.conv2d(image, window) for image in (x, z))
        (va, vb, both) = (functional.conv2d(one, window) for one in (x * x, z * z, x * z))
        top, bottom = (2 * a * b + 0.01) * (2 * (both - a * b) + 0.03), a * a + b * b + 0.01
        return 1 - (top / (bottom * (va - a * a + vb - b * b + 0.03))).mean()

    return job(nn.Conv2d(1, 1, 3, padding=1), loss, (torch.rand(ROWS, 1, 12, 12),))


@JOBS.add
def only_above_a_threshold() -> TrainingJob:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        each = functional.cross_entropy(m(x), y, reduction="none")
        return each[each > 1.2].mean()

    return job(perceptron(), loss)


@JOBS.add
def branch_by_a_value() -> TrainingJob:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        found = classify(m, x, y)
        return found if found > 1.0 else found * 0.5

    return job(perceptron(), loss)


@JOBS.add
def batch_changed_in_place() -> TrainingJob:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return classify(m, x.sub_(x.mean(0)).div_(x.std(0) + 1e-3), y)

    return job(perceptron(), loss)
