"""Networks that people write."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, rnn
from torch.utils.checkpoint import checkpoint

from benchmarks.follow_zoo.stranger_jobs.making import CLASSES, ROWS, WIDTH, Jobs, job, perceptron, rows, targets
from port_planner.job import TrainingJob

JOBS = Jobs("networks")

LAYERS: dict[str, tuple[Callable[[], list[nn.Module]], tuple[int, ...]]] = {
    "separable": (lambda: [nn.Conv2d(3, 6, 3, groups=3), nn.Conv2d(6, 8, 1), nn.ReLU6()], (3, 9, 9)),
    "transposed": (lambda: [nn.ConvTranspose2d(3, 4, 4, 2, 1), nn.InstanceNorm2d(4, affine=True)], (3, 6, 6)),
    "dilated": (lambda: [nn.Conv1d(4, 8, 3, dilation=2), nn.GLU(1)], (4, 20)),
    "voxels": (lambda: [nn.Conv3d(2, 4, 3), nn.BatchNorm3d(4), nn.ReLU()], (2, 6, 6, 6)),
    "groups_of_channels": (lambda: [nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.SiLU()], (3, 8, 8)),
    "shuffled_pixels": (lambda: [nn.Conv2d(3, 12, 3, padding=1), nn.PixelShuffle(2), nn.PReLU(3)], (3, 6, 6)),
    "pooled": (lambda: [nn.MaxPool2d(3, 2, 1), nn.AdaptiveAvgPool2d(3), nn.LPPool2d(2, 2, 1)], (3, 11, 11)),
    "pooled_at_random": (lambda: [nn.FractionalMaxPool2d(2, output_size=4)], (3, 10, 10)),
    "resized": (lambda: [nn.Upsample(scale_factor=1.5, mode="bilinear", align_corners=True)], (3, 8, 8)),
    "reflected": (lambda: [nn.ReflectionPad2d(2), nn.Conv2d(3, 4, 3), nn.Hardswish()], (3, 8, 8)),
    "leaky_at_random": (lambda: [nn.Linear(WIDTH, 20), nn.RReLU()], (WIDTH,)),
    "dropped_features": (lambda: [nn.AlphaDropout(0.2), nn.Linear(WIDTH, 20), nn.SELU()], (WIDTH,)),
    "dropped_channels": (lambda: [nn.Conv2d(3, 8, 3), nn.Dropout2d(0.3)], (3, 8, 8)),
    "averaged_for_ever": (lambda: [nn.BatchNorm1d(WIDTH, momentum=None)], (WIDTH,)),
    "attention": (lambda: [nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True)], (7, WIDTH)),
    "local_response": (lambda: [nn.Conv2d(3, 8, 3), nn.LocalResponseNorm(3)], (3, 8, 8)),
    "folded": (lambda: [nn.Unfold(3), nn.ReLU()], (3, 6, 6)),
}


def _layers(layers: Callable[[], list[nn.Module]], shape: tuple[int, ...]) -> TrainingJob:
    x = rows(*shape)
    model = nn.Sequential(*layers(), nn.Flatten())
    model.append(nn.Linear(model(x[:2]).shape[1], CLASSES))
    return job(model, nn.CrossEntropyLoss(), (x, targets()))


for _name, (_made, _shape) in LAYERS.items():
    JOBS.named(_name, lambda made=_made, shape=_shape: _layers(made, shape))  # type: ignore[misc]


class _Forward(nn.Module):
    """Named parts, and a function that computes from them."""

    def __init__(self, forward: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.compute = forward

    def forward(self, *batch: Tensor) -> Tensor:
        return self.compute(self, *batch)


def _classified(model: nn.Module, *data: Tensor, **settings: Any) -> TrainingJob:
    return job(model, nn.CrossEntropyLoss(), (*data, targets()), **settings)


@JOBS.add
def recurrent_both_ways() -> TrainingJob:
    parts = {"r": nn.GRU(6, 8, 2, batch_first=True, bidirectional=True, dropout=0.2), "h": nn.Linear(16, CLASSES)}
    return _classified(_Forward(lambda m, x: m.h(m.r(x)[0].mean(1)), **parts), rows(9, 6))


@JOBS.add
def recurrent_over_padding() -> TrainingJob:
    def forward(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        hidden: Tensor = m.h(m.r(packed)[1][0][-1])
        return hidden

    parts = {"r": nn.LSTM(6, 8, batch_first=True), "h": nn.Linear(8, CLASSES)}
    return _classified(_Forward(forward, **parts), rows(9, 6), torch.randint(3, 10, (ROWS,)))


@JOBS.add
def causal_language() -> TrainingJob:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.e(x)
        q, k, v = m.qkv(h).view(*x.shape, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        logits: Tensor = functional.linear(h + m.o(mixed.transpose(1, 2).flatten(2)), m.e.weight)
        return logits

    model = _Forward(forward, e=nn.Embedding(40, 16), qkv=nn.Linear(16, 48), o=nn.Linear(16, 16))

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return functional.cross_entropy(m(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

    return job(model, loss, (torch.randint(0, 40, (ROWS, 12)),), torch.optim.AdamW(model.parameters(), 1e-2))


@JOBS.add
def masked_attention() -> TrainingJob:
    def forward(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
        padded = torch.arange(x.shape[1]) >= lengths[:, None]
        mixed, _ = m.a(x, x, x, key_padding_mask=padded)
        pooled: Tensor = m.h(mixed.masked_fill(padded[..., None], 0).sum(1) / lengths[:, None])
        return pooled

    parts = {"a": nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True), "h": nn.Linear(16, CLASSES)}
    return _classified(_Forward(forward, **parts), rows(8, 16), torch.randint(3, 9, (ROWS,)))


@JOBS.add
def experts() -> TrainingJob:
    def forward(m: Any, x: Tensor) -> Tensor:
        weights, chosen = m.gate(x).softmax(1).topk(2)
        every = torch.stack([expert(x) for expert in m.experts], 1)
        return (every.gather(1, chosen[..., None].expand(-1, -1, CLASSES)) * weights[..., None]).sum(1)

    parts = {"gate": nn.Linear(WIDTH, 4), "experts": nn.ModuleList(perceptron() for _ in range(4))}
    return _classified(_Forward(forward, **parts), rows(WIDTH))


@JOBS.add
def experts_with_rows_of_their_own() -> TrainingJob:
    def forward(m: Any, x: Tensor) -> Tensor:
        chosen, out = m.gate(x).argmax(1), x.new_zeros(len(x), CLASSES)
        for i, expert in enumerate(m.experts):
            out[chosen == i] = expert(x[chosen == i])
        return out

    parts = {"gate": nn.Linear(WIDTH, 3), "experts": nn.ModuleList(perceptron() for _ in range(3))}
    return _classified(_Forward(forward, **parts), rows(WIDTH))


@JOBS.add
def graph_convolution() -> TrainingJob:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        summed = torch.zeros_like(h).index_add(1, m.into, h[:, m.source])
        scores: Tensor = m.b(functional.relu(summed)).mean(1)
        return scores

    edges = torch.randint(0, 10, (2, 30))
    parts: dict[str, Any] = {"a": nn.Linear(6, 12), "b": nn.Linear(12, CLASSES), "source": edges[0], "into": edges[1]}
    return _classified(_Forward(forward, **parts), rows(10, 6))


@JOBS.add
def graph_attention() -> TrainingJob:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        score = functional.leaky_relu(m.s(torch.cat([h[:, m.source], h[:, m.into]], -1)))[..., 0].exp()
        total = torch.zeros(len(x), 10).scatter_add(1, m.into.expand(len(x), -1), score)
        share = score / (total[:, m.into] + 1e-6)
        out: Tensor = m.b(torch.zeros_like(h).index_add(1, m.into, share[..., None] * h[:, m.source])).amax(1)
        return out

    edges = torch.randint(0, 10, (2, 30))
    parts: dict[str, Any] = {
        "a": nn.Linear(6, 8),
        "s": nn.Linear(16, 1),
        "b": nn.Linear(8, CLASSES),
        "source": edges[0],
        "into": edges[1],
    }
    return _classified(_Forward(forward, **parts), rows(10, 6))


@JOBS.add
def spectral_operator() -> TrainingJob:
    def forward(m: Any, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft2(x)
        kept = torch.zeros_like(spectrum)
        kept[..., :4, :4] = torch.einsum("bixy,ioxy->boxy", spectrum[..., :4, :4], m.w)
        scores: Tensor = m.h(torch.fft.irfft2(kept, s=x.shape[-2:]).mean((2, 3)))
        return scores

    parts = {"w": nn.Parameter(torch.randn(3, 3, 4, 4, dtype=torch.cfloat) / 3), "h": nn.Linear(3, CLASSES)}
    return _classified(_Forward(forward, **parts), rows(3, 12, 12))


@JOBS.add
def warped() -> TrainingJob:
    def forward(m: Any, x: Tensor) -> Tensor:
        grid = functional.affine_grid(m.t(x.flatten(1)).view(-1, 2, 3), list(x.shape), align_corners=False)
        scores: Tensor = m.h(functional.grid_sample(x, grid, align_corners=False).flatten(1))
        return scores

    return _classified(_Forward(forward, t=nn.Linear(64, 6), h=nn.Linear(64, CLASSES)), rows(1, 8, 8))


@JOBS.add
def invertible_flow() -> TrainingJob:
    def loss(m: Any, x: Tensor) -> Tensor:
        z, logs = x, torch.zeros(())
        for part in m.parts:
            a, b = z.chunk(2, 1)
            scale, shift = part(a).chunk(2, 1)
            z, logs = torch.cat([b * scale.tanh().exp() + shift, a], 1), logs + scale.tanh().sum(1).mean()
        z = z @ m.mix
        return 0.5 * z.pow(2).sum(1).mean() - logs - torch.linalg.slogdet(m.mix)[1]

    parts = {"parts": nn.ModuleList(perceptron(8, 16) for _ in range(3)), "mix": nn.Parameter(torch.eye(16))}
    return job(_Forward(lambda m, x: x, **parts), loss, (rows(16),))


@JOBS.add
def differential_equation() -> TrainingJob:
    def forward(m: Any, x: Tensor) -> Tensor:
        for _ in range(4):
            a = m.f(x)
            b = m.f(x + a / 8)
            x = x + (a + 2 * b) / 12
        scores: Tensor = m.h(x)
        return scores

    return _classified(_Forward(forward, f=perceptron(WIDTH, WIDTH), h=nn.Linear(WIDTH, CLASSES)), rows(WIDTH))


@JOBS.add
def selective_scan() -> TrainingJob:
    def forward(m: Any, x: Tensor) -> Tensor:
        step = functional.softplus(m.d(x))
        state, out = x.new_zeros(len(x), 6), []
        for t in range(x.shape[1]):
            state = (-step[:, t]).exp() * state + step[:, t] * x[:, t]
            out.append(state)
        scores: Tensor = m.h(torch.stack(out, 1).mean(1))
        return scores

    return _classified(_Forward(forward, d=nn.Linear(6, 6), h=nn.Linear(6, CLASSES)), rows(10, 6))


@JOBS.add
def weights_of_weights() -> TrainingJob:
    def forward(m: Any, x: Tensor) -> Tensor:
        return torch.bmm(x[:, None], m.make(x).view(len(x), WIDTH, CLASSES))[:, 0]

    return _classified(_Forward(forward, make=nn.Linear(WIDTH, WIDTH * CLASSES)), rows(WIDTH))


@JOBS.add
def normed_weights() -> TrainingJob:
    return _classified(parametrizations.weight_norm(nn.Linear(WIDTH, CLASSES)), rows(WIDTH))


@JOBS.add
def spectral_norm() -> TrainingJob:
    return _classified(parametrizations.spectral_norm(nn.Linear(WIDTH, CLASSES)), rows(WIDTH))


@JOBS.add
def orthogonal_weights() -> TrainingJob:
    return _classified(parametrizations.orthogonal(nn.Linear(WIDTH, CLASSES)), rows(WIDTH))


@JOBS.add
def embeddings_of_bounded_norm() -> TrainingJob:
    model = nn.Sequential(nn.Embedding(30, 8, max_norm=1.0), nn.Flatten(), nn.Linear(48, CLASSES))
    return _classified(model, torch.randint(0, 30, (ROWS, 6)))


@JOBS.add
def bags_of_words() -> TrainingJob:
    model = nn.Sequential(nn.EmbeddingBag(30, 8, mode="mean"), nn.Linear(8, CLASSES))
    return _classified(model, torch.randint(0, 30, (ROWS, 6)))


@JOBS.add
def checkpointed() -> TrainingJob:
    def forward(m: Any, x: Tensor) -> Tensor:
        for layer in m.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        scores: Tensor = m.h(x)
        return scores

    layers = nn.ModuleList(nn.Sequential(perceptron(WIDTH, WIDTH), nn.Dropout(0.1)) for _ in range(3))
    return _classified(_Forward(forward, layers=layers, h=nn.Linear(WIDTH, CLASSES)), rows(WIDTH))


@JOBS.add
def rows_left_out_at_random() -> TrainingJob:
    def forward(m: Any, x: Tensor) -> Tensor:
        for layer in m.layers:
            x = x + layer(x) * (torch.rand(len(x), 1) > 0.2) / 0.8
        scores: Tensor = m.h(x)
        return scores

    layers = nn.ModuleList(perceptron(WIDTH, WIDTH) for _ in range(3))
    return _classified(_Forward(forward, layers=layers, h=nn.Linear(WIDTH, CLASSES)), rows(WIDTH))


@JOBS.add
def layers_left_out_at_random() -> TrainingJob:
    def forward(m: Any, x: Tensor) -> Tensor:
        for layer in m.layers:
            if torch.rand(()) > 0.2:
                x = x + layer(x)
        scores: Tensor = m.h(x)
        return scores

    layers = nn.ModuleList(perceptron(WIDTH, WIDTH) for _ in range(3))
    return _classified(_Forward(forward, layers=layers, h=nn.Linear(WIDTH, CLASSES)), rows(WIDTH))


@JOBS.add
def low_rank_beside_frozen() -> TrainingJob:
    parts: dict[str, Any] = {
        "base": nn.Linear(WIDTH, CLASSES).requires_grad_(False),
        "a": nn.Linear(WIDTH, 2, bias=False),
        "b": nn.Linear(2, CLASSES, bias=False),
    }
    return _classified(_Forward(lambda m, x: m.base(x) + 2 * m.b(m.a(x)), **parts), rows(WIDTH))


@JOBS.add
def choices_by_gumbel() -> TrainingJob:
    def forward(m: Any, x: Tensor) -> Tensor:
        scores: Tensor = m.b(functional.gumbel_softmax(m.a(x), tau=0.7, hard=True))
        return scores

    return _classified(_Forward(forward, a=nn.Linear(WIDTH, 6), b=nn.Linear(6, CLASSES)), rows(WIDTH))


@JOBS.add
def half_precision() -> TrainingJob:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return functional.cross_entropy(m(x).float(), y)

    return job(perceptron(), loss)


@JOBS.add
def double_precision() -> TrainingJob:
    return _classified(perceptron().double(), rows(WIDTH).double())


@JOBS.add
def quantized_while_trained() -> TrainingJob:
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    fake = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8)
    return _classified(nn.Sequential(fake, *perceptron()), rows(WIDTH))


@JOBS.add
def quantized_after_a_first_batch() -> TrainingJob:
    made = quantized_while_trained()
    made.model(made.data[0][:2])
    return made


@JOBS.add
def quantized_by_rows() -> TrainingJob:
    from torch.ao.quantization import QuantStub, get_default_qat_qconfig, prepare_qat

    model = nn.Sequential(QuantStub(), *perceptron())
    model.qconfig = get_default_qat_qconfig("fbgemm")
    prepare_qat(model, inplace=True)
    made = _classified(model, rows(WIDTH))
    model(made.data[0][:2])
    return made


@JOBS.add
def averaged_in_lists() -> TrainingJob:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    body = nn.Sequential(*perceptron())
    average: Any = AveragedModel(body, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average.requires_grad_(False).update_parameters(body)
    made = _classified(_Forward(lambda m, x: m.body(x), body=body, average=average), rows(WIDTH))
    made.optimizer.register_step_post_hook(lambda *_: average.update_parameters(body))
    return made


@JOBS.add
def buffer_replaced_and_marked() -> TrainingJob:
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.profiler.record_function("average"):
            m.average = 0.9 * m.average + 0.1 * x.detach().mean(0)
        return m.body(x - m.average)

    return _classified(_Forward(forward, body=nn.Sequential(*perceptron()), average=torch.zeros(WIDTH)), rows(WIDTH))


@JOBS.add
def rounded_straight_through() -> TrainingJob:
    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return (x * 8).round() / 8

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    return _classified(_Forward(lambda m, x: m.body(Round.apply(x)), body=perceptron()), rows(WIDTH))


@JOBS.add
def memory_bank() -> TrainingJob:
    def loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
        z = functional.normalize(m.body(x))
        against = torch.cat([(z * z.roll(1, 0)).sum(1, keepdim=True), z @ m.bank.clone().T], 1)
        with torch.no_grad():
            m.bank.copy_(torch.cat([z, m.bank[: -len(z)]]))
        return functional.cross_entropy(against / 0.2, torch.zeros_like(y))

    return job(_Forward(lambda m, x: x, body=perceptron(), bank=torch.randn(24, CLASSES)), loss)


@JOBS.add
def memory_bank_with_a_place() -> TrainingJob:
    def loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
        z = functional.normalize(m.body(x))
        found = functional.cross_entropy(z @ m.bank.clone().T / 0.2, torch.zeros_like(y))
        with torch.no_grad():
            begin = int(m.place)
            m.bank[begin : begin + len(z)] = z
            m.place.copy_((m.place + len(z)) % len(m.bank))
        return found

    buffers = {"bank": torch.randn(24, CLASSES), "place": torch.zeros((), dtype=torch.long)}
    return job(_Forward(lambda m, x: x, body=perceptron(), **buffers), loss, drop_last=True)


@JOBS.add
def counts_in_a_buffer() -> TrainingJob:
    def loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            m.steps += 1
        return functional.cross_entropy(m.body(x), y) * (m.steps / 10).clamp(max=1)

    return job(_Forward(lambda m, x: x, body=perceptron(), steps=torch.zeros(())), loss)


@JOBS.add
def spectral_gates_of_polar_numbers() -> TrainingJob:
    def forward(m: Any, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(x.view(-1, 8, 2).contiguous()) * torch.polar(torch.ones(8), m.angles)
        scores: Tensor = m.h(torch.view_as_real(turned).flatten(1))
        return scores

    return _classified(_Forward(forward, angles=nn.Parameter(torch.rand(8)), h=nn.Linear(16, CLASSES)), rows(WIDTH))


@JOBS.add
def shared_weights() -> TrainingJob:
    encode, decode = nn.Linear(WIDTH, 6, bias=False), nn.Linear(6, WIDTH, bias=False)
    decode.weight = nn.Parameter(encode.weight.T.contiguous())
    encode.weight = nn.Parameter(encode.weight)
    twice = nn.Linear(6, 6)
    return job(
        nn.Sequential(encode, twice, nn.Tanh(), twice, decode), lambda m, x: (m(x) - x).pow(2).mean(), (rows(WIDTH),)
    )


@JOBS.add
def products_along_time() -> TrainingJob:
    def forward(m: Any, x: Tensor) -> Tensor:
        scores: Tensor = m.h(m.a(x).sigmoid().cumprod(1))
        return scores

    return _classified(_Forward(forward, a=nn.Linear(WIDTH, 8), h=nn.Linear(8, CLASSES)), rows(WIDTH))
