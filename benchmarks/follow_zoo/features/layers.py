"""Layers of torch.nn and functions of torch inside a small network: one program each."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.follow_zoo.features.registry import CLASSES, Features, classify, learn, perceptron, rows, square

FEATURES = Features("layers")


def _image() -> Tensor:
    return torch.randn(4, 8, 12, 12)


def _signal() -> Tensor:
    return torch.randn(4, 8, 24)


def _volume() -> Tensor:
    return torch.randn(2, 4, 6, 6, 6)


def _sequence() -> Tensor:
    return torch.randn(4, 10, 32)


class _Between(nn.Module):
    """A layer behind one with weights, so that its gradient is needed."""

    def __init__(self, layer: nn.Module, channels: int, dims: int) -> None:
        super().__init__()
        convolution = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}.get(dims)
        self.first = nn.Linear(32, 32) if convolution is None else convolution(channels, channels, 1)
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return self.layer(self.first(x))


def _trains(make: Callable[[], nn.Module], batch: Callable[[], Tensor], channels: int, dims: int) -> Any:
    model = _Between(make(), channels, dims)
    return learn(model, lambda m: square(m(batch())))


_IMAGE_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "conv2d": lambda: nn.Conv2d(8, 16, 3, padding=1),
    "conv2d_stride_dilation": lambda: nn.Conv2d(8, 16, 3, stride=2, dilation=2),
    "conv2d_depthwise": lambda: nn.Conv2d(8, 16, 3, groups=8),
    "conv2d_circular": lambda: nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular"),
    "conv_transpose2d": lambda: nn.ConvTranspose2d(8, 8, 3, stride=2, output_padding=1),
    "max_pool2d": lambda: nn.MaxPool2d(2),
    "max_pool2d_indices": lambda: nn.MaxPool2d(2, return_indices=True),
    "avg_pool2d": lambda: nn.AvgPool2d(3, 2),
    "lp_pool2d": lambda: nn.LPPool2d(2, 2),
    "fractional_max_pool2d": lambda: nn.FractionalMaxPool2d(2, output_ratio=0.5),
    "adaptive_avg_pool2d": lambda: nn.AdaptiveAvgPool2d(5),
    "adaptive_max_pool2d": lambda: nn.AdaptiveMaxPool2d(5),
    "batch_norm2d": lambda: nn.BatchNorm2d(8),
    "batch_norm2d_cumulative": lambda: nn.BatchNorm2d(8, momentum=None),
    "batch_norm2d_no_statistics": lambda: nn.BatchNorm2d(8, track_running_stats=False),
    "batch_norm2d_inplace_relu": lambda: nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 1)),
    "group_norm": lambda: nn.GroupNorm(4, 8),
    "instance_norm2d": lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
    "local_response_norm": lambda: nn.LocalResponseNorm(3),
    "dropout2d": lambda: nn.Dropout2d(0.3),
    "pixel_shuffle": lambda: nn.Sequential(nn.PixelShuffle(2), nn.PixelUnshuffle(2)),
    "upsample_nearest": lambda: nn.Upsample(scale_factor=2),
    "upsample_bilinear": lambda: nn.Upsample(scale_factor=1.5, mode="bilinear"),
    "upsample_bicubic": lambda: nn.Upsample(size=(9, 9), mode="bicubic"),
    "unfold_fold": lambda: nn.Sequential(nn.Unfold(3, padding=1), nn.Fold((12, 12), 3, padding=1)),
    "reflection_pad2d": lambda: nn.ReflectionPad2d(2),
    "replication_pad2d": lambda: nn.ReplicationPad2d((1, 2, 3, 0)),
    "constant_pad2d": lambda: nn.ConstantPad2d(2, 1.5),
    "channel_shuffle": lambda: nn.ChannelShuffle(4),
    "softmax2d": lambda: nn.Softmax2d(),
}
for _name, _make in _IMAGE_LAYERS.items():
    FEATURES.named(_name, partial(_trains, _make, _image, 8, 2))

_SIGNAL_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "conv1d": lambda: nn.Conv1d(8, 8, 5, padding="same"),
    "conv_transpose1d": lambda: nn.ConvTranspose1d(8, 8, 4, stride=2),
    "batch_norm1d": lambda: nn.BatchNorm1d(8),
    "max_pool1d": lambda: nn.MaxPool1d(3),
    "adaptive_avg_pool1d": lambda: nn.AdaptiveAvgPool1d(7),
    "feature_alpha_dropout": lambda: nn.FeatureAlphaDropout(0.2),
    "upsample_linear": lambda: nn.Upsample(scale_factor=2, mode="linear"),
}
for _name, _make in _SIGNAL_LAYERS.items():
    FEATURES.named(_name, partial(_trains, _make, _signal, 8, 1))

_VOLUME_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "conv3d": lambda: nn.Conv3d(4, 4, 3, padding=1),
    "batch_norm3d": lambda: nn.BatchNorm3d(4),
    "max_pool3d": lambda: nn.MaxPool3d(2),
    "upsample_trilinear": lambda: nn.Upsample(scale_factor=2, mode="trilinear"),
}
for _name, _make in _VOLUME_LAYERS.items():
    FEATURES.named(_name, partial(_trains, _make, _volume, 4, 3))

_ACTIVATIONS = (
    "ELU", "Hardshrink", "Hardsigmoid", "Hardtanh", "Hardswish", "LeakyReLU", "LogSigmoid", "PReLU", "ReLU", "ReLU6", "RReLU",
    "SELU", "CELU", "GELU", "Sigmoid", "SiLU", "Mish", "Softplus", "Softshrink", "Softsign", "Tanh", "Tanhshrink", "AlphaDropout",
    "GLU", "LogSoftmax", "Softmin",
)  # fmt: skip
for _name in _ACTIVATIONS:
    _options: dict[str, Any] = {"dim": -1} if _name in {"GLU", "LogSoftmax", "Softmin"} else {}
    FEATURES.named(_name.lower(), partial(_trains, partial(getattr(nn, _name), **_options), _sequence, 32, 0))

_SEQUENCE_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "layer_norm": lambda: nn.LayerNorm(32),
    "rms_norm": lambda: nn.RMSNorm(32),
    "rnn": lambda: nn.RNN(32, 16, batch_first=True),
    "lstm_two_layers_dropout": lambda: nn.LSTM(32, 16, 2, batch_first=True, dropout=0.2),
    "lstm_projection": lambda: nn.LSTM(32, 16, proj_size=8, batch_first=True),
    "lstm_bidirectional": lambda: nn.LSTM(32, 16, bidirectional=True),
    "gru": lambda: nn.GRU(32, 16, batch_first=True),
    "transformer_encoder_layer": lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True),
    "transformer_encoder_norm_first": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, 64, norm_first=True, batch_first=True), 2, enable_nested_tensor=False
    ),
    "unflatten": lambda: nn.Sequential(nn.Unflatten(2, (4, 8)), nn.Flatten(2)),
}
for _name, _make in _SEQUENCE_LAYERS.items():
    FEATURES.named(_name, partial(_trains, _make, _sequence, 32, 0))

_FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "attention_causal": lambda x: functional.scaled_dot_product_attention(*x.view(3, 2, 2, 8, -1), is_causal=True),
    "attention_dropout": lambda x: functional.scaled_dot_product_attention(*x.view(3, 2, 2, 8, -1), dropout_p=0.2),
    "fft": lambda x: torch.fft.irfft(torch.fft.rfft(x) * torch.linspace(0, 1, 25)),
    "stft": lambda x: torch.stft(x.flatten(), 16, window=torch.hann_window(16), return_complex=True),
    "svd": lambda x: torch.linalg.svd(x @ x.T + 5 * torch.diag(torch.arange(16.0)))[1],
    "cholesky_solve": lambda x: torch.linalg.solve(torch.linalg.cholesky(x @ x.T + 5 * torch.eye(16)), x),
    "qr": lambda x: torch.linalg.qr(x.T)[1],
    "eigh": lambda x: torch.linalg.eigh(x @ x.T + 5 * torch.diag(torch.arange(16.0)))[0],
    "matrix_exp": lambda x: torch.matrix_exp(x[:, :16] * 0.1),
    "inverse": lambda x: torch.linalg.inv(x @ x.T + torch.eye(16)),
    "slogdet": lambda x: torch.linalg.slogdet(x @ x.T + torch.eye(16))[1],
    "einsum": lambda x: torch.einsum("ij,kj,k->ik", x, x, x[:, 0]),
    "sort": lambda x: torch.sort(x, dim=0)[0] * torch.arange(48),
    "topk": lambda x: torch.topk(x, 5, dim=1)[0],
    "median": lambda x: torch.median(x, dim=0)[0],
    "cumsum": lambda x: torch.cumsum(x, 0),
    "cumprod": lambda x: torch.cumprod(x.sigmoid(), 1),
    "logcumsumexp": lambda x: torch.logcumsumexp(x, 0),
    "scatter_add": lambda x: torch.zeros(16, 48).scatter_add(0, torch.randint(0, 16, (16, 48)), x),
    "scatter_reduce": lambda x: torch.zeros(16, 48).scatter_reduce(0, torch.randint(0, 16, (16, 48)), x, "amax"),
    "index_add": lambda x: torch.zeros(4, 48).index_add(0, torch.randint(0, 4, (16,)), x),
    "index_put_accumulate": lambda x: torch.zeros(16, 48).index_put((torch.randint(0, 16, (16,)),), x, accumulate=True),
    "gather": lambda x: torch.gather(x, 1, torch.randint(0, 48, (16, 9))),
    "masked_rows": lambda x: x[x[:, 0] > 0],
    "masked_select": lambda x: torch.masked_select(x, x > 0.1),
    "nonzero_rows": lambda x: x[torch.nonzero(x[:, 1] > 0).squeeze(1)],
    "where": lambda x: torch.where(x > 0, x, x * 0.1),
    "cdist": lambda x: torch.cdist(x, x.flip(0) + 1),
    "kron": lambda x: torch.kron(x[:4, :4], x[4:8, 4:8]),
    "roll_flip": lambda x: torch.roll(x, 3, 1) * x.flip(0),
    "unique_count": lambda x: x * torch.unique((x.detach() * 3).round(), return_counts=True)[1].sum(),
    "bernoulli": lambda x: x * torch.bernoulli(x.detach().sigmoid()),
    "multinomial": lambda x: x[torch.multinomial(x.detach().abs().mean(1), 8)],
    "gumbel_softmax": lambda x: functional.gumbel_softmax(x, hard=True),
    "poisson": lambda x: x * torch.poisson(x.detach().abs()),
    "randperm": lambda x: x[torch.randperm(16)] * torch.arange(48),
    "normal_inplace": lambda x: x * torch.empty_like(x).normal_().exponential_(),
    "rsample_normal": lambda x: torch.distributions.Normal(x, x.exp()).rsample(),
    "rsample_dirichlet": lambda x: torch.distributions.Dirichlet(x.exp() + 0.5).rsample(),
    "rsample_gamma": lambda x: torch.distributions.Gamma(x.exp(), 1.0).rsample(),
    "pad_sequence": lambda x: nn.utils.rnn.pad_sequence([x[i, : 10 + i] for i in range(16)]),
    "grid_sample": lambda x: functional.grid_sample(
        x.view(1, 3, 16, 16), torch.rand(1, 9, 9, 2) * 2 - 1, align_corners=False
    ),
    "affine_grid": lambda x: functional.affine_grid(
        x.reshape(-1)[:12].view(2, 2, 3), [2, 1, 6, 6], align_corners=False
    ),
    "chunk_split_cat": lambda x: torch.cat([*x.chunk(3, 1), *x.split(5)[0].unbind(0)[0].split(16)[:1]][:3], 1),
    "stack_meshgrid": lambda x: torch.stack(torch.meshgrid(x[0], x[1], indexing="ij")),
    "histc": lambda x: x * torch.histc(x.detach(), 8).max(),
    "searchsorted": lambda x: x * torch.searchsorted(torch.linspace(-2, 2, 20), x.detach()),
    "renorm": lambda x: torch.renorm(x, 2, 0, 1.0),
    "prod": lambda x: x.sigmoid().prod(1),
    "var_mean": lambda x: torch.stack(torch.var_mean(x, 1)),
    "logsumexp": lambda x: torch.logsumexp(x, 1),
    "empty_batch": lambda x: torch.cat([x, x[:0]]),
    "expand_repeat": lambda x: x[:, None].expand(16, 3, 48) * x.repeat_interleave(3, 0).view(16, 3, 48),
    "diag_tril": lambda x: torch.tril(x @ x.T) + torch.diag_embed(x[:, 0]),
    "complex_product": lambda x: torch.view_as_real(torch.view_as_complex(x.view(16, 24, 2)) ** 2 * 1j),
    "baddbmm": lambda x: torch.baddbmm(x.view(4, 4, 48), x.view(4, 4, 48), x.new_ones(4, 48, 48) * 0.1),
    "as_strided": lambda x: torch.as_strided(x, (8, 8), (48, 2), 3),
    "lu_factor": lambda x: torch.linalg.lu_factor(x @ x.T + torch.eye(16))[0],
    "householder": lambda x: torch.linalg.householder_product(x.T[:20, :4] * 0.1, x[0, :4]),
    "take_along_dim": lambda x: torch.take_along_dim(x, x.detach().argsort(1), 1) * torch.arange(48),
    "special": lambda x: torch.special.i0(x) + torch.lgamma(x.abs() + 1) + torch.erf(x),
}


def _through(function: Callable[[Tensor], Any]) -> Any:
    model = perceptron(nn.Tanh(), outputs=48)
    return learn(model, lambda m: square(function(m(rows()))))


for _name, _function in _FUNCTIONS.items():
    FEATURES.named(_name, partial(_through, _function))


@FEATURES.add
def packed_gru() -> Any:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.out = nn.GRU(32, 16, bidirectional=True), nn.Linear(32, CLASSES)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
            unpacked, _ = nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0])
            return self.out(unpacked)

    return learn(Tagger(), lambda m: square(m(torch.randn(12, 6, 32), torch.randint(1, 13, (6,)))))


@FEATURES.add
def attention_weights_and_mask() -> Any:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True, kdim=16, vdim=16)

        def forward(self, q: Tensor, kv: Tensor) -> Any:
            mask = torch.rand(len(q), kv.shape[1]) > 0.8
            mask[:, 0] = False
            return self.attention(q, kv, kv, key_padding_mask=mask)

    return learn(Attends(), lambda m: square(m(torch.randn(4, 7, 32), torch.randn(4, 9, 16))))


@FEATURES.add
def transformer_both_sides() -> Any:
    model = nn.Transformer(32, 4, 1, 1, 64, batch_first=True)
    mask = model.generate_square_subsequent_mask(7)
    return learn(model, lambda m: square(m(torch.randn(4, 9, 32), torch.randn(4, 7, 32), tgt_mask=mask)))


@FEATURES.add
def transformer_encoder_fast_path_in_eval() -> Any:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)
    seen = []

    def evaluate(step: int) -> None:
        model.eval()
        padding = torch.zeros(4, 9, dtype=torch.bool)
        padding[:, 6:] = True
        with torch.no_grad():
            seen.append(model(torch.randn(4, 9, 32), src_key_padding_mask=padding))
        model.train()

    return learn(model, lambda m: square(m(torch.randn(4, 9, 32))), after=evaluate), seen


@FEATURES.add
def embedding_padding_max_norm() -> Any:
    model = nn.Sequential(nn.Embedding(500, 32, padding_idx=0, max_norm=1.0, scale_grad_by_freq=True), nn.Linear(32, 4))
    return learn(model, lambda m: square(m(torch.randint(0, 500, (16, 12)))))


@FEATURES.add
def embedding_large_integers() -> Any:
    model = nn.Sequential(nn.Embedding(500, 8), nn.Linear(8, 4))
    return learn(model, lambda m: square(m(torch.randint(0, 500, (64, 128)))))


def _bag(mode: str, sparse: bool) -> Any:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.out = nn.EmbeddingBag(600, 32, mode=mode, sparse=sparse), nn.Linear(32, 4)

        def forward(self, words: Tensor, offsets: Tensor) -> Tensor:
            return self.out(self.bag(words, offsets))

    make = (lambda p: torch.optim.SGD(p, lr=0.1)) if sparse else None
    return learn(Bag(), lambda m: square(m(torch.randint(0, 600, (200,)), torch.arange(0, 200, 10))), make)


for _mode in ("sum", "mean", "max"):
    FEATURES.named(f"embedding_bag_{_mode}", partial(_bag, _mode, False))
FEATURES.named("embedding_bag_sparse", partial(_bag, "mean", True))


@FEATURES.add
def bilinear() -> Any:
    return learn(nn.Bilinear(16, 16, 8), lambda m: square(m(rows(16), rows(16))))


@FEATURES.add
def lstm_cell_unrolled() -> Any:
    class Unrolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTMCell(16, 32)

        def forward(self, x: Tensor) -> Tensor:
            h = c = x.new_zeros(x.shape[1], 32)
            for row in x:
                h, c = self.cell(row, (h, c))
            return h

    return learn(Unrolled(), lambda m: square(m(torch.randn(20, 8, 16))))


@FEATURES.add
def max_unpool() -> Any:
    class Unpools(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            pooled, where = functional.max_pool2d(self.first(x), 2, return_indices=True)
            return functional.max_unpool2d(pooled, where, 2)

    return learn(Unpools(), lambda m: square(m(_image())))


@FEATURES.add
def wide_and_deep_residuals() -> Any:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(12))
            self.out = nn.Linear(32, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + functional.gelu(block(x))
            return self.out(x)

    return learn(Residual(), classify)
