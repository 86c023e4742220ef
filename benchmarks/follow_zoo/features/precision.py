"""Data types, autocast, gradient scaling and quantization-aware training."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.follow_zoo.compare import state, training_begins
from benchmarks.follow_zoo.features.registry import Features, classify, learn, perceptron, rows, square, targets

FEATURES = Features("precision")


def _in_type(dtype: torch.dtype) -> Any:
    model = perceptron().to(dtype)
    return learn(model, lambda m: nn.functional.cross_entropy(m(rows().to(dtype)).float(), targets()))


for _dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
    FEATURES.named(f"all_{str(_dtype).removeprefix('torch.')}", partial(_in_type, _dtype))


def _autocast(dtype: torch.dtype, cache: bool, optimizer: type[torch.optim.Optimizer]) -> Any:
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8))

    def loss(m: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype, cache_enabled=cache):
            return classify(m) + classify(m)

    return learn(model, loss, optimizer)


for _dtype in (torch.bfloat16, torch.float16):
    for _cache in (True, False):
        _name = f"autocast_{str(_dtype).removeprefix('torch.')}_{'cached' if _cache else 'uncached'}"
        FEATURES.named(_name, partial(_autocast, _dtype, _cache, torch.optim.AdamW))


@FEATURES.add
def autocast_convolutions_and_attention() -> Any:
    class Sees(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)
            self.attention, self.out = nn.MultiheadAttention(16, 4, batch_first=True), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(self.conv(x)).relu().flatten(2).transpose(1, 2)
            return self.out(self.attention(x, x, x)[0].mean(1))

    def loss(m: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return square(m(torch.randn(4, 3, 10, 10)))

    return learn(Sees(), loss)


def _scaled(infinite_at: int | None) -> Any:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    training_begins()
    for step in range(5):
        with torch.autocast("cpu", torch.float16):
            loss = classify(model)
        if step == infinite_at:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return state(model, optimizer), scaler.state_dict()


FEATURES.named("grad_scaler", partial(_scaled, None))
FEATURES.named("grad_scaler_with_infinity", partial(_scaled, 2))


@FEATURES.add
def master_weights() -> Any:
    model = perceptron().bfloat16()
    masters = [p.detach().float() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters)
    training_begins()
    for _ in range(4):
        nn.functional.cross_entropy(model(rows().bfloat16()).float(), targets()).backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad, p.grad = p.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
    return masters, state(model, optimizer)


@FEATURES.add
def complex_weights() -> Any:
    weight = nn.Parameter(torch.randn(32, 32, dtype=torch.complex64))
    model = nn.ParameterList([weight])
    return learn(model, lambda m: (rows().to(torch.complex64) @ m[0]).abs().square().mean())


@FEATURES.add
def default_type_double() -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        return learn(perceptron(), classify)
    finally:
        torch.set_default_dtype(torch.float32)


@FEATURES.add
def pixels_in_bytes() -> Any:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(800, 8))
    return learn(model, lambda m: square(m(torch.randint(0, 256, (4, 3, 12, 12), dtype=torch.uint8).float() / 255)))


@FEATURES.add
def fake_quantization() -> Any:
    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(32, 64), nn.Parameter(torch.tensor([0.05]))

        def forward(self, x: Tensor) -> Tensor:
            w = torch.fake_quantize_per_tensor_affine(self.linear.weight, 0.02, 0, -128, 127)
            x = nn.functional.linear(x, w, self.linear.bias)
            return torch._fake_quantize_learnable_per_tensor_affine(x, self.scale, torch.zeros(1), -128, 127, 0.1)

    return learn(Quantized(), lambda m: square(m(rows())))


@FEATURES.add
def frozen_int8_weights_with_adapter() -> Any:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            w = torch.randn(64, 32)
            self.register_buffer("scale", w.abs().amax(1, keepdim=True) / 127)
            self.register_buffer("packed", (w / self.scale).round().to(torch.int8))
            self.down, self.up = nn.Linear(32, 4, bias=False), nn.Linear(4, 64, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.packed.float() * self.scale).T + self.up(self.down(x))

    return learn(Adapted(), lambda m: square(m(rows())))


@FEATURES.add
def float8_casts() -> Any:
    def loss(m: nn.Module) -> Tensor:
        with torch.no_grad():
            x = rows().to(torch.float8_e4m3fn).float()
        return nn.functional.cross_entropy(m(x), targets())

    return learn(perceptron(), loss)


@FEATURES.add
def mixed_types_in_one_model() -> Any:
    model = nn.ModuleList([nn.Linear(32, 64).bfloat16(), nn.Linear(64, 64).double(), nn.Linear(64, 8)])
    return learn(model, lambda m: square(m[2](m[1](m[0](rows().bfloat16()).double()).float())))


@FEATURES.add
def deterministic_algorithms() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        return learn(
            perceptron(), lambda m: square(m(rows()).index_add(0, torch.randint(0, 16, (4,)), torch.ones(4, 8)))
        )
    finally:
        torch.use_deterministic_algorithms(False)


def _matmul(precision: str) -> Any:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        return learn(perceptron(), classify)
    finally:
        torch.set_float32_matmul_precision(before)


for _precision in ("highest", "high", "medium"):
    FEATURES.named(f"matmul_{_precision}", partial(_matmul, _precision))


@FEATURES.add
def flushed_denormals() -> Any:
    torch.set_flush_denormal(True)
    try:
        return learn(perceptron(), lambda m: square(m(rows() * 1e-38)))
    finally:
        torch.set_flush_denormal(False)


@FEATURES.add
def nothing_from_onednn() -> Any:
    with torch.backends.mkldnn.flags(enabled=False):
        return learn(nn.Conv2d(4, 8, 3), lambda m: square(m(torch.randn(4, 4, 12, 12))))
