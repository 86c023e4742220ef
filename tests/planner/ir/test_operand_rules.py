"""Recorded steps fit; the same steps with indices from elsewhere, other shapes or another order are refused."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks.models import WORKLOADS, workload
from planner.capture.step import capture_evaluation, capture_step
from planner.ir.devices.transfers import transfer_of
from planner.ir.graph import Argument, GraphError, Op, Ref, Role, StepGraph
from planner.ir.operand_rules import verify_operands
from planner.problem.placed_step import placed_step
from planner.slices.blocks import blocks_of, large_weights, read_in_blocks
from tests.planner.slices.table_step import reader, reader_batch, reader_loss


class Everything(nn.Module):
    """Every operator that trusts its backward pass to be called by autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8, padding_idx=0)
        self.same_words = nn.Embedding(11, 8, scale_grad_by_freq=True)
        self.bags = nn.EmbeddingBag(11, 16, mode="sum")
        self.shared = nn.EmbeddingBag(11, 16, mode="sum").requires_grad_(False)
        self.shares = nn.Parameter(torch.rand(3, 8))
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(1, 4, 3))
        self.norm, self.frozen, self.layer = nn.BatchNorm2d(4), nn.BatchNorm2d(4).eval(), nn.LayerNorm(8)

    def train(self, mode: bool = True) -> "Everything":
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.words(tokens) + self.same_words(tokens)).unsqueeze(1)  # n, 1, 8, 8
        x = functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        x = functional.pad(x, (2, 1, 1, 2), mode="reflect")
        x = self.frozen(self.norm(self.conv(x)))
        x = functional.max_pool2d(x, 2, stride=1) + functional.adaptive_max_pool2d(x, 8)
        x = functional.interpolate(x, scale_factor=1.5, mode="bilinear")
        x = functional.pad(functional.avg_pool2d(x, 3), (1, 0, 0, 1), mode="replicate")
        grid = torch.linspace(-1, 1, 5).view(1, 5, 1, 1).expand(len(x), 5, 5, 2)
        x = functional.grid_sample(x, grid, align_corners=False)
        x = functional.adaptive_avg_pool2d(x.unfold(2, 3, 2).sum(-1) + x.unfold(-2, 3, 2).sum(-1), 2)
        bags = self.bags(tokens.flip(1)) + self.shared(tokens.roll(1), per_sample_weights=self.shares)
        return functional.gelu(x.flatten(1)) + bags


def of_volumes(x: torch.Tensor) -> torch.Tensor:
    """Return the mean of what operators on volumes make of x (n, 1, 4, 4, 4)."""
    x = functional.pad(functional.pad(x, (1,) * 6, mode="reflect"), (1,) * 6, mode="replicate")
    x = functional.interpolate(x, scale_factor=1.5, mode="trilinear")
    grid = torch.linspace(-1, 1, 5).view(1, 5, 1, 1, 1).expand(len(x), 5, 5, 5, 3)
    x = functional.grid_sample(x, grid, align_corners=False)
    drawn = torch.full((len(x), 1, 3), 0.5)
    x = functional.adaptive_max_pool3d(x, 3) + functional.fractional_max_pool3d(x, 2, 3, _random_samples=drawn)
    return functional.fractional_max_pool2d(x[..., 0], 2, 2, _random_samples=drawn[..., :2]).mean()


def of_rows(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return a loss of rows of numbers (n, k) that is a sum of margins and distances."""
    margins = functional.multi_margin_loss(x, labels) + functional.multilabel_margin_loss(
        x, labels[:, None].expand_as(x) % 2
    )
    return margins + torch.cdist(x, 2 * x).mean() + functional.pdist(x).mean()


def loss(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model(tokens)
    pixels = logits.view(len(logits), 4, 2, 2)
    frames, lengths = pixels.flatten(2).permute(2, 0, 1).log_softmax(-1), torch.full((len(logits),), 4)
    spoken = functional.ctc_loss(frames, labels[:, None] % 3 + 1, lengths, torch.ones_like(labels))
    return (
        spoken
        + of_volumes(logits.tile(4).view(-1, 1, 4, 4, 4))
        + of_rows(logits, labels)
        + functional.cross_entropy(logits, labels)
        + functional.cross_entropy(pixels, labels[:, None, None].expand(-1, 2, 2) % 4)
    )


@pytest.fixture(scope="module")
def graph() -> StepGraph:
    torch.manual_seed(0)
    model = Everything()
    batch = (torch.randint(0, 11, (3, 8)), torch.randint(0, 16, (3,)))
    return capture_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch).graphs["step"]


@pytest.mark.long
@pytest.mark.parametrize("name", WORKLOADS)
def test_every_model_fits(name: str) -> None:
    w = workload(name, small=True)
    graphs = capture_step(w.model, w.loss_fn, torch.optim.SGD(w.model.parameters(), lr=0.1), w.batch(0)).graphs
    verify_operands(graphs["step"])
    verify_operands(capture_evaluation(w.model, w.loss_fn, w.batch(0)).graphs["eval"])


def test_heads_that_share_keys_fit() -> None:
    """As in Llama: fewer heads of keys and values than of queries."""
    model = nn.Linear(8, 8)

    def attend(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        q = model(x)
        return functional.scaled_dot_product_attention(q, q[:, :2], q[:, 2:], enable_gqa=True).sum()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = capture_step(model, attend, optimizer, (torch.randn(2, 4, 5, 8),)).graphs["step"]
    verify_operands(graph)
    assert any("flash_attention_for_cpu_backward" in op.name for op in graph.ops)


def place(graph: StepGraph, name: str) -> int:
    return next(i for i, op in enumerate(graph.ops) if op.name.partition("::")[2].partition(".")[0] == name)


def changed(graph: StepGraph, name: str, change: Callable[[Op], Op]) -> StepGraph:
    """Return the graph with the first call of `name` changed."""
    i = place(graph, name)
    return replace(graph, ops=(*graph.ops[:i], change(graph.ops[i]), *graph.ops[i + 1 :]))


INDICES = {
    "max_pool2d_with_indices_backward": 7, "adaptive_max_pool2d_backward": 2, "nll_loss_backward": 2, "nll_loss2d_backward": 2,
    "embedding_dense_backward": 1, "_ctc_loss_backward": 2, "adaptive_max_pool3d_backward": 2, "fractional_max_pool2d_backward": 4,
    "fractional_max_pool3d_backward": 4, "_embedding_bag_backward": 1, "_embedding_bag_per_sample_weights_backward": 2,
}  # fmt: skip
"""Place of the argument whose values nobody checks."""

TRUSTED = (
    *INDICES, "native_batch_norm_backward", "native_layer_norm_backward", "_log_softmax_backward_data", "gelu_backward",
    "_scaled_dot_product_flash_attention_for_cpu_backward", "_adaptive_avg_pool2d_backward", "avg_pool2d_backward",
    "reflection_pad2d_backward", "replication_pad2d_backward", "grid_sampler_2d_backward", "unfold_backward",
    "reflection_pad3d_backward", "replication_pad3d_backward", "grid_sampler_3d_backward", "_cdist_backward", "_pdist_backward",
)  # fmt: skip
"""Operators whose first argument has to have the shape that the others say."""


def test_what_was_recorded_fits(graph: StepGraph) -> None:
    verify_operands(graph)
    names = {op.name.partition("::")[2].partition(".")[0] for op in graph.ops}
    assert set(TRUSTED) | {"native_batch_norm"} <= names


@pytest.mark.parametrize("name", INDICES)
def test_indices_from_elsewhere(graph: StepGraph, name: str) -> None:
    """A value of the same layout that comes with the batch or the file."""
    op = graph.ops[place(graph, name)]
    index = op.args[INDICES[name]]
    assert isinstance(index, Ref)
    value = replace(graph.values[index.value], storage=len(graph.storages))
    storages = (*graph.storages, replace(graph.storages[graph.values[index.value].storage], name="mine"))
    wide = replace(graph, storages=storages, values=(*graph.values, value))
    args = tuple(Ref(len(graph.values)) if i == INDICES[name] else a for i, a in enumerate(op.args))
    with pytest.raises(GraphError, match=name):
        verify_operands(changed(wide, name, lambda op: replace(op, args=args)))


@pytest.mark.parametrize("name", INDICES)
def test_indices_that_are_changed_after_they_were_checked(graph: StepGraph, name: str) -> None:
    i = place(graph, name)
    index = graph.ops[i].args[INDICES[name]]
    assert isinstance(index, Ref)
    fill = Op(
        "aten::fill_.Scalar",
        (index, 1 << 40),
        (),
        (index.value,),
        (graph.values[index.value].storage,),
        graph.ops[i].phase,
    )
    with pytest.raises(GraphError, match=name):
        verify_operands(replace(graph, ops=(*graph.ops[:i], fill, *graph.ops[i:])))


def with_copied_indices(graph: StepGraph, name: str) -> StepGraph:
    """Return the graph with a copy, made right before the call of `name`, in the place of its indices."""
    i = place(graph, name)
    op, index = graph.ops[i], graph.ops[i].args[INDICES[name]]
    assert isinstance(index, Ref)
    value = graph.values[index.value]
    dense = torch.empty_strided(value.shape, value.stride, device="meta").clone().stride()
    copied = replace(value, storage=len(graph.storages), stride=dense, offset=0)
    made = Op("aten::clone", (index,), (), (len(graph.values),), (), op.phase)
    args = tuple(Ref(len(graph.values)) if k == INDICES[name] else a for k, a in enumerate(op.args))
    storages = (*graph.storages, replace(graph.storages[value.storage], role=Role.TEMPORARY, name=""))
    ops = (*graph.ops[:i], made, replace(op, args=args), *graph.ops[i + 1 :])
    return replace(graph, ops=ops, storages=storages, values=(*graph.values, copied))


@pytest.mark.parametrize("name", INDICES)
def test_copies_of_indices_that_were_checked(graph: StepGraph, name: str) -> None:
    verify_operands(with_copied_indices(graph, name))


@pytest.mark.parametrize("name", INDICES)
@pytest.mark.parametrize("copy", [True, False])
def test_copies_that_are_changed_or_made_of_what_was_changed(graph: StepGraph, name: str, copy: bool) -> None:
    copied = with_copied_indices(graph, name)
    i = place(copied, name)
    at = i if copy else i - 1  # after the copy was made, or before
    written = copied.ops[i].args[INDICES[name]] if copy else copied.ops[i - 1].args[0]
    assert isinstance(written, Ref)
    storage = copied.values[written.value].storage
    fill = Op("aten::fill_.Scalar", (written, 1 << 40), (), (written.value,), (storage,), copied.ops[i].phase)
    with pytest.raises(GraphError, match=name):
        verify_operands(replace(copied, ops=(*copied.ops[:at], fill, *copied.ops[at:])))


@pytest.mark.parametrize("name", INDICES)
def test_a_copy_that_is_made_after_it_is_read(graph: StepGraph, name: str) -> None:
    copied = with_copied_indices(graph, name)
    i = place(copied, name)
    with pytest.raises(GraphError, match=name):
        verify_operands(copied.reordered((*range(i - 1), i, i - 1, *range(i + 1, len(copied.ops)))))


@pytest.fixture(
    scope="module",
    params=[(True, torch.float32), (False, torch.float32), (True, torch.bfloat16)],
    ids=["biases", "no biases", "bfloat16"],
)
def recurrent(request: pytest.FixtureRequest) -> StepGraph:
    biases, kind = request.param
    if kind is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor has no kernel of oneDNN for recurrent layers in bfloat16; PyTorch takes them apart")
    model = nn.LSTM(5, 6, num_layers=2, bidirectional=True, batch_first=True, bias=biases, dtype=kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randn(3, 4, 5).to(kind),)
    return capture_step(model, lambda model, x: model(x)[0].square().mean(), optimizer, batch).graphs["step"]


LSTM_OPERANDS = [("mkldnn_rnn_layer", i) for i in range(7)] + [
    ("mkldnn_rnn_layer_backward", i) for i in (*range(11), 22)
]


def test_recorded_lstms_fit(recurrent: StepGraph) -> None:
    verify_operands(recurrent)
    names = [op.name for op in recurrent.ops]
    assert names.count("aten::mkldnn_rnn_layer") == names.count("aten::mkldnn_rnn_layer_backward") == 4


@pytest.mark.parametrize(("name", "operand"), LSTM_OPERANDS)
@pytest.mark.parametrize("change", ["shape", "dtype", "stride", "storage"])
def test_operands_that_do_not_fit_an_lstm(recurrent: StepGraph, name: str, operand: int, change: str) -> None:
    argument = recurrent.ops[place(recurrent, name)].args[operand]
    assert isinstance(argument, Ref)
    value = recurrent.values[argument.value]
    changes: dict[str, dict[str, Any]] = {
        "shape": {"shape": (*value.shape[:-1], value.shape[-1] + 1)},
        "dtype": {"dtype": "bfloat16" if value.dtype == "float32" else "float32"},
        "stride": {"stride": (*value.stride[:-1], 2)},
        "storage": {"storage": 0},
    }
    gradient, workspace = operand == 10, operand == 22
    if (change == "stride" and gradient) or (change == "storage" and not workspace):
        return  # a gradient may lie anyhow, and only a workspace must be the one that was made
    wide = replace(recurrent, values=(*recurrent.values, replace(value, **changes[change])))
    args = (*recurrent.ops[place(recurrent, name)].args,)
    other = (*args[:operand], Ref(len(recurrent.values)), *args[operand + 1 :])
    with pytest.raises(GraphError, match=name):
        verify_operands(changed(wide, name, lambda op: replace(op, args=other)))


@pytest.mark.parametrize(
    ("operand", "forged"), [(7, 1), (8, (2, 1)), (9, 3), (10, 7), (10, 0), (11, 0), (11, 1 << 40), (12, None), (15, 1)]
)
def test_numbers_that_do_not_fit_an_lstm(recurrent: StepGraph, operand: int, forged: Argument) -> None:
    args = recurrent.ops[place(recurrent, "mkldnn_rnn_layer")].args
    other = (*args[:operand], forged, *args[operand + 1 :])
    with pytest.raises(GraphError, match="mkldnn_rnn_layer"):
        verify_operands(changed(recurrent, "mkldnn_rnn_layer", lambda op: replace(op, args=other)))


@pytest.mark.parametrize("operand", [13, 16, 17, 18, 20, 21])  # reverse, sizes, flags of the forward pass
def test_a_backward_pass_of_another_lstm(recurrent: StepGraph, operand: int) -> None:
    name = "mkldnn_rnn_layer_backward"
    args = recurrent.ops[place(recurrent, name)].args
    was = args[operand]
    values: dict[int, Argument] = {13: not was, 16: 3, 17: not was, 18: False, 20: (1,), 21: not was}
    other = (*args[:operand], values[operand], *args[operand + 1 :])
    with pytest.raises(GraphError, match=name):
        verify_operands(changed(recurrent, name, lambda op: replace(op, args=other)))


@pytest.mark.parametrize("name", ["nll_loss_backward", "embedding_dense_backward", "_ctc_loss_backward"])
def test_a_backward_pass_before_the_forward_pass_that_checks(graph: StepGraph, name: str) -> None:
    i = place(graph, name)
    order = (i, *range(i), *range(i + 1, len(graph.ops)))
    with pytest.raises(GraphError, match=name):
        verify_operands(graph.reordered(order))


def rows_in_blocks() -> StepGraph:
    """Return a step whose table of embeddings is trained in blocks of rows."""
    model = reader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = capture_step(model, reader_loss, optimizer, reader_batch(0)).graphs["step"]
    (weight,) = large_weights([graph], 100_000)
    return read_in_blocks(graph, {weight.name: blocks_of(weight, 4)}).graph


@pytest.mark.parametrize(
    ("clamp", "change"),
    [
        ("clamp_max", lambda op: replace(op, args=(op.args[0], op.args[1] + 1))),
        ("clamp_max", lambda op: replace(op, args=(op.args[0], -1))),
        ("clamp_max", lambda op: replace(op, args=(op.args[0], 1.5))),
        ("clamp_max", lambda op: replace(op, name="aten::clamp_min")),
        ("clamp_min", lambda op: replace(op, args=(op.args[0], -1))),
        ("clamp_min", lambda op: replace(op, name="aten::clamp_max")),
    ],
)
def test_rows_of_a_gradient_are_bounded_from_both_sides(clamp: str, change: Callable[[Op], Op]) -> None:
    graph = rows_in_blocks()
    verify_operands(graph)
    gradient = place(graph, "embedding_dense_backward")
    bound = max(i for i in range(gradient) if graph.ops[i].name == f"aten::{clamp}")
    ops = tuple(change(op) if i == bound else op for i, op in enumerate(graph.ops))
    with pytest.raises(GraphError, match="embedding_dense_backward"):
        verify_operands(replace(graph, ops=ops))


def test_rows_of_a_gradient_are_not_written_once_they_are_bounded() -> None:
    graph = rows_in_blocks()
    gradient = place(graph, "embedding_dense_backward")
    op = graph.ops[gradient]
    assert isinstance(op.args[1], Ref)
    index = op.args[1].value
    spoilt = Op("aten::zero_", (Ref(index),), (), (index,), (graph.values[index].storage,), op.phase)
    with pytest.raises(GraphError, match="embedding_dense_backward"):
        verify_operands(replace(graph, ops=(*graph.ops[:gradient], spoilt, *graph.ops[gradient:])))


@pytest.mark.parametrize("name", TRUSTED)
def test_a_gradient_of_another_shape(graph: StepGraph, name: str) -> None:
    v = graph.ops[place(graph, name)].args[0]
    assert isinstance(v, Ref)
    value = graph.values[v.value]
    other = replace(value, shape=(*value.shape, 1), stride=(*value.stride, 1))
    wide = replace(graph, values=(*graph.values, other))
    with pytest.raises(GraphError, match=name):
        verify_operands(changed(wide, name, lambda op: replace(op, args=(Ref(len(graph.values)), *op.args[1:]))))


@pytest.mark.parametrize("name", ["multi_margin_loss_backward", "multilabel_margin_loss_backward"])
def test_a_gradient_of_no_element(graph: StepGraph, name: str) -> None:
    v = graph.ops[place(graph, name)].args[0]
    assert isinstance(v, Ref)
    none = replace(graph.values[v.value], shape=(0,), stride=(1,))
    wide = replace(graph, values=(*graph.values, none))
    with pytest.raises(GraphError, match=name):
        verify_operands(changed(wide, name, lambda op: replace(op, args=(Ref(len(graph.values)), *op.args[1:]))))


@pytest.mark.parametrize(
    "change",
    [
        lambda op: replace(op, args=(1, *op.args[1:])), lambda op: replace(op, args=(op.args[0], 1 << 20, op.args[2])),
        lambda op: replace(op, args=(*op.args[:2], 0)), lambda op: replace(op, name="aten::arange.start"),
    ],
    ids=["begins later", "ends behind the indices", "bags of nothing", "another operator"],
)  # fmt: skip
def test_bags_begin_where_rows_do(graph: StepGraph, change: Callable[[Op], Op]) -> None:
    with pytest.raises(GraphError, match="_embedding_bag"):
        verify_operands(changed(graph, "arange", change))


def test_statistics_for_other_channels(graph: StepGraph) -> None:
    op = graph.ops[place(graph, "native_batch_norm")]
    weight = op.args[1]
    assert isinstance(weight, Ref)
    short = replace(graph.values[weight.value], shape=(1,))
    wide = replace(graph, values=(*graph.values, short))
    for i in (1, 2, 3, 4):
        args = tuple(Ref(len(graph.values)) if k == i else a for k, a in enumerate(op.args))
        with pytest.raises(GraphError, match="native_batch_norm"):
            verify_operands(changed(wide, "native_batch_norm", lambda op, args=args: replace(op, args=args)))


@pytest.mark.parametrize("scale", [1e-45, 0.0, -1.0, float("nan"), float("inf"), 0.5, "1"])
def test_scales_that_contradict_the_sizes(graph: StepGraph, scale: float) -> None:
    name = "upsample_bilinear2d"
    fits = changed(graph, name, lambda op: replace(op, args=(*op.args[:3], 1.5, 1.5), kwargs=()))
    verify_operands(fits)
    with pytest.raises(GraphError, match=name):
        verify_operands(changed(graph, name, lambda op: replace(op, args=(*op.args[:3], scale, 1.5), kwargs=())))


@pytest.mark.parametrize(
    ("dims", "normalization", "fits"),
    [((1, 2), 1, True), ((2,), 0, True), ((2, 2), 0, False), ((3,), 0, False), ((), 0, False), ((2,), 7, False)],
)
def test_fourier_dimensions_are_there_once(dims: tuple[int, ...], normalization: int, fits: bool) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.fft(x * self.weight, dim=-1).real.square().sum()

    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = capture_step(model, lambda m, x: m(x), optimizer, (torch.randn(2, 4, 6),)).graphs["step"]
    wrong = changed(graph, "_fft_c2c", lambda op: replace(op, args=(op.args[0], dims, normalization, True)))
    with contextlib.nullcontext() if fits else pytest.raises(GraphError, match="_fft_c2c"):
        verify_operands(wrong)


def test_indices_may_come_over_from_another_device_as_they_are_and_not_changed_on_the_way() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 4))
    batch = torch.randn(2, 1, 8, 8), torch.tensor([1, 3])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = capture_step(model, lambda m, x, y: functional.cross_entropy(m(x), y), optimizer, batch).graphs["step"]
    pooled = next(i for i, op in enumerate(recorded.ops) if op.name == "aten::max_pool2d_with_indices")
    kinds = ["sim" if i == pooled else "cpu" for i in range(len(recorded.ops))]
    there = placed_step(recorded, kinds).graph
    verify_operands(there)
    back = [
        i
        for i, op in enumerate(there.ops)
        if (t := transfer_of(there, op)) and there.storages[t.target].device == "cpu"
    ]
    changed = [replace(op, name="aten::bitwise_not", kwargs=()) if i in back else op for i, op in enumerate(there.ops)]
    with pytest.raises(GraphError, match="max_pool2d_with_indices_backward"):
        verify_operands(replace(there, ops=tuple(changed)))
