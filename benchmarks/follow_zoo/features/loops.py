"""Ordinary training loops, and loops for which recording a step and replaying it gives silently wrong results."""

import collections
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.follow_zoo.compare import state, training_begins
from benchmarks.follow_zoo.features.registry import (
    CLASSES,
    Features,
    classify,
    learn,
    perceptron,
    rows,
    square,
    targets,
)

FEATURES = Features("loops")


@FEATURES.add
def batch_in_a_user_dict() -> Any:
    def loss(m: nn.Module) -> Tensor:
        batch = collections.UserDict(x=rows(), y=targets())
        return nn.functional.cross_entropy(m(batch["x"]), batch["y"])

    return learn(perceptron(), loss)


@dataclass
class _Batch:
    x: Tensor
    y: Tensor
    weight: float


@FEATURES.add
def batch_in_a_dataclass_with_a_float() -> Any:
    def loss(m: nn.Module) -> Tensor:
        batch = _Batch(rows(), targets(), random.random())
        return batch.weight * nn.functional.cross_entropy(m(batch.x), batch.y)

    return learn(perceptron(), loss)


@FEATURES.add
def batch_of_numpy() -> Any:
    def loss(m: nn.Module) -> Tensor:
        x, y = np.random.randn(16, 32).astype("f"), np.random.randint(0, CLASSES, 16)
        return nn.functional.cross_entropy(m(torch.as_tensor(x)), torch.as_tensor(y))

    return learn(perceptron(), loss)


@FEATURES.add
def noise_of_three_generators() -> Any:
    def loss(m: nn.Module) -> Tensor:
        x = rows() * random.gauss(1, 0.1) + float(np.random.rand())
        return square(m(x))

    return learn(perceptron(), loss)


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count, self.inner = 0, perceptron()
        self.register_buffer("average", torch.zeros(400))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.average = self.average * 0.9 + x.mean() * 0.1
        return self.inner(x) * (1 + 1 / self.count) + self.average.mean()


@FEATURES.add
def counter_and_rebound_buffer() -> Any:
    return learn(_Counting(), classify)


@FEATURES.add
def layers_dropped_by_python() -> Any:
    model = nn.ModuleList([nn.Linear(32, 32) for _ in range(5)])

    def loss(m: nn.Module) -> Tensor:
        x = rows().requires_grad_()
        for layer in m:
            if random.random() > 0.4:
                x = layer(x).relu()
        return square(x)

    return learn(model, loss)


@FEATURES.add
def rows_chosen_by_a_mask() -> Any:
    def loss(m: nn.Module) -> Tensor:
        out, y = m(rows()), targets()
        keep = out.max(1)[0] > out.mean()
        return nn.functional.cross_entropy(out[keep], y[keep])

    return learn(perceptron(), loss)


@FEATURES.add
def weights_clamped_between_steps() -> Any:
    model = perceptron()

    def clamp(step: int) -> None:
        for p in model.parameters():
            p.data.clamp_(-0.1, 0.1)

    return learn(model, classify, after=clamp)


@FEATURES.add
def frozen_and_thawed_between_steps() -> Any:
    model = perceptron()

    def change(step: int) -> None:
        model[0].requires_grad_(step % 2 == 1)

    return learn(model, classify, after=change, steps=6)


@FEATURES.add
def lengths_vary() -> Any:
    model = nn.GRU(32, 32)
    return learn(model, lambda m: square(m(torch.randn(random.randint(3, 20), random.randint(1, 6), 32))), steps=8)


@FEATURES.add
def two_batch_sizes_alternate() -> Any:
    sizes = iter([16, 16, 5] * 4)
    return learn(perceptron(), lambda m: square(m(rows(count=next(sizes)))), steps=9)


@FEATURES.add
def evaluation_between_epochs() -> Any:
    model, seen = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(), nn.Linear(32, 8)), []

    def evaluate(step: int) -> None:
        if step % 3 == 2:
            model.eval()
            with torch.no_grad():
                seen.append([(model(rows()).argmax(1) == targets()).float().mean().item() for _ in range(3)])
            model.train()

    return learn(model, classify, after=evaluate, steps=9), seen


@FEATURES.add
def two_networks_against_each_other() -> Any:
    maker, judge = perceptron(outputs=32), perceptron(outputs=1)
    one, other = torch.optim.Adam(maker.parameters()), torch.optim.Adam(judge.parameters())
    bce = nn.functional.binary_cross_entropy_with_logits
    training_begins()
    for _ in range(4):
        fake = maker(rows())
        other.zero_grad()
        (bce(judge(rows()), torch.ones(16, 1)) + bce(judge(fake.detach()), torch.zeros(16, 1))).backward()
        other.step()
        one.zero_grad()
        bce(judge(fake), torch.ones(16, 1)).backward()
        one.step()
    return state(maker, judge, one, other)


@FEATURES.add
def network_grows_while_training() -> Any:
    model = nn.Sequential(nn.Linear(32, 32))
    training_begins()
    for _ in range(4):
        model.append(nn.Linear(32, 32))
        optimizer = torch.optim.Adam(model.parameters())
        square(model(rows())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@FEATURES.add
def average_of_weights_by_hand() -> Any:
    model, average = perceptron(), perceptron()

    @torch.no_grad()
    def update(step: int) -> None:
        for kept, p in zip(average.parameters(), model.parameters(), strict=True):
            kept.mul_(0.9).add_(p, alpha=0.1)

    return learn(model, classify, after=update), state(average)


@FEATURES.add
def policy_gradient() -> Any:
    policy = perceptron(nn.Tanh())
    optimizer = torch.optim.Adam(policy.parameters())
    training_begins()
    for _ in range(4):
        observed, steps = torch.randn(32), []
        for _ in range(8):
            choice = torch.distributions.Categorical(logits=policy(observed))
            action = choice.sample()
            steps.append(choice.log_prob(action) * float(observed[action]))
            observed = observed.roll(int(action)) + 0.1 * torch.randn(32)
        optimizer.zero_grad()
        (-torch.stack(steps).sum()).backward()
        optimizer.step()
    return state(policy)


@FEATURES.add
def target_network_and_replay() -> Any:
    online, target = perceptron(nn.ReLU()), perceptron(nn.ReLU())
    optimizer, memory = torch.optim.RMSprop(online.parameters()), collections.deque(maxlen=50)
    training_begins()
    for step in range(12):
        memory.append((torch.randn(32), random.randrange(CLASSES), random.random(), torch.randn(32)))
        if len(memory) < 6:
            continue
        before, action, reward, after = zip(*random.sample(memory, 6), strict=True)
        with torch.no_grad():
            wanted = torch.tensor(reward) + 0.9 * target(torch.stack(after)).max(1)[0]
        value = online(torch.stack(before)).gather(1, torch.tensor(action)[:, None])[:, 0]
        optimizer.zero_grad()
        nn.functional.smooth_l1_loss(value, wanted).backward()
        optimizer.step()
        if step % 4 == 0:
            target.load_state_dict(online.state_dict())
    return state(online, target, optimizer)


@FEATURES.add
def text_generated_between_steps() -> Any:
    model = nn.ModuleDict({"words": nn.Embedding(64, 32), "cell": nn.GRUCell(32, 32), "out": nn.Linear(32, 64)})
    said: list[Any] = []

    def loss(m: nn.ModuleDict) -> Tensor:
        hidden, total = torch.zeros(4, 32), torch.zeros(())
        text = torch.randint(0, 64, (4, 9))
        for i in range(8):
            hidden = m["cell"](m["words"](text[:, i]), hidden)
            total = total + nn.functional.cross_entropy(m["out"](hidden), text[:, i + 1])
        return total

    @torch.no_grad()
    def generate(step: int) -> None:
        hidden, word = torch.zeros(1, 32), torch.zeros(1, dtype=torch.long)
        for _ in range(6):
            hidden = model["cell"](model["words"](word), hidden)
            word = torch.multinomial(model["out"](hidden).softmax(1), 1)[0]
            said.append(word)

    return learn(model, loss, after=generate), said


@FEATURES.add
def noise_removed_step_by_step() -> Any:
    model = nn.Sequential(
        nn.Conv2d(4, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 4, 3, padding=1)
    )
    kept = torch.linspace(0.99, 0.1, 50).cumprod(0)

    def loss(m: nn.Module) -> Tensor:
        clean, noise, t = torch.randn(4, 4, 8, 8), torch.randn(4, 4, 8, 8), torch.randint(0, 50, (4,))
        share = kept[t].view(-1, 1, 1, 1)
        return nn.functional.mse_loss(m(share.sqrt() * clean + (1 - share).sqrt() * noise), noise)

    result = learn(model, loss)
    with torch.no_grad():
        x = torch.randn(2, 4, 8, 8)
        for _ in range(5):
            x = x - 0.1 * model(x) + 0.01 * torch.randn_like(x)
    return result, x


@FEATURES.add
def codes_with_straight_gradients() -> Any:
    model = nn.ModuleDict({"in": nn.Linear(32, 16), "codes": nn.Embedding(40, 16), "out": nn.Linear(16, 32)})

    def loss(m: nn.ModuleDict) -> Tensor:
        x = rows()
        hidden = m["in"](x)
        code = m["codes"](torch.cdist(hidden, m["codes"].weight).argmin(1))
        passed = hidden + (code - hidden).detach()
        return nn.functional.mse_loss(m["out"](passed), x) + (code - hidden.detach()).square().mean()

    return learn(model, loss)


@FEATURES.add
def batches_from_a_generator_with_early_stop() -> Any:
    def batches() -> Iterator[Tensor]:
        while True:
            yield rows(count=random.choice([8, 16]))

    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training_begins()
    losses: list[float] = []
    for x in batches():
        loss = square(model(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) > 8 or (len(losses) > 3 and losses[-1] > losses[-2]):
            break
    return losses, state(model)


@FEATURES.add
def batch_size_found_by_failing() -> Any:
    model, tried = perceptron(), []
    training_begins()
    for size in (64, 32, 16):
        try:
            tried.append(size)
            out = model(rows(count=size))
            if size > 16:
                raise MemoryError
            square(out).backward()
        except MemoryError:
            continue
    return tried, state(model)


@FEATURES.add
def whole_training_twice_in_one_budget() -> Any:
    return [learn(perceptron(), classify) for _ in range(2)]


@FEATURES.add
def training_in_a_function_that_returns_only_losses() -> Any:
    return [learn(perceptron(), classify, steps=2)[0] for _ in range(4)]


@FEATURES.add
def losses_kept_with_their_graphs() -> Any:
    model = perceptron(nn.Tanh())
    training_begins()
    total = torch.zeros(())
    for _ in range(5):
        total = total + classify(model)
    total.backward()
    return total, state(model)


@FEATURES.add
def metrics_in_running_tensors() -> Any:
    model, confusion = perceptron(), torch.zeros(CLASSES, CLASSES)

    def count(step: int) -> None:
        with torch.no_grad():
            said, true = model(rows()).argmax(1), targets()
            confusion.index_put_((true, said), torch.ones(16), accumulate=True)

    return learn(model, classify, after=count), confusion


@FEATURES.add
def mixup_and_cutout() -> Any:
    def loss(m: nn.Module) -> Tensor:
        x, y = rows(), targets()
        share = float(np.random.beta(1, 1))
        order = torch.randperm(16)
        x = share * x + (1 - share) * x[order]
        x[:, random.randrange(24) :][:, :8] = 0
        out = m(x)
        return share * nn.functional.cross_entropy(out, y) + (1 - share) * nn.functional.cross_entropy(out, y[order])

    return learn(perceptron(), loss)


@FEATURES.add
def adversarial_inputs() -> Any:
    def loss(m: nn.Module) -> Tensor:
        x, y = rows().requires_grad_(), targets()
        slope = torch.autograd.grad(nn.functional.cross_entropy(m(x), y), x)[0]
        return nn.functional.cross_entropy(m((x + 0.1 * slope.sign()).detach()), y)

    return learn(perceptron(), loss)


@FEATURES.add
def cycles_of_references() -> Any:
    model = perceptron()

    def loss(m: nn.Module) -> Tensor:
        out = m(rows())
        out.myself = [out]
        return square(out)

    return learn(model, loss, steps=6)
