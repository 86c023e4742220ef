"""Micro-batches that run layer by layer leave the gradients of those that run one by one, read weights
once, or are refused by name.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from port_agent import budget
from port_agent.finetuning.accumulation.by_layers import ByLayers, Inputs, NotByLayersError
from port_agent.finetuning.accumulation.head_loss import LearnedLoss
from port_agent.finetuning.text.sequence_file import IGNORED
from tests.agent.finetuning.accumulation.small_models import VOCABULARY, model_of
from tests.agent.finetuning.tiny_model import shape_of

LEARNED = 301
KINDS = ("llama", "qwen3", "gemma2", "gemma3_text", "mistral", "phi3", "gpt_neox", "gpt2")


def batches_of(count: int = 3) -> list[Inputs]:
    """Return batches of several lengths, of one only the end is learned."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for number in range(count):
        tokens = torch.randint(0, VOCABULARY, (2, 32 + 16 * number), generator=generator)
        labels = tokens.clone()
        if number == 1:
            labels[:, :36] = IGNORED
        made.append((tokens, labels))
    return made


def one_by_one(model: Any, batches: list[Inputs], head_rows: int | None = None, *, autocast: bool = False) -> float:
    loss = LearnedLoss(model, head_rows, autocast=autocast)
    return sum(loss(tokens, labels, gradient_of=LEARNED).item() for tokens, labels in batches)


def by_layers(model: Any, batches: list[Inputs], head_rows: int | None = None, *, autocast: bool = False) -> float:
    return ByLayers(model, LearnedLoss(model, head_rows, autocast=autocast))(batches, LEARNED)


def gradients_of(model: Any) -> dict[str, torch.Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def assert_same(model: Any, other: Any) -> None:
    mine, others = gradients_of(model), gradients_of(other)
    assert mine.keys() == others.keys() and any(g is not None for g in mine.values())
    for name, gradient in mine.items():
        also = others[name]
        assert (gradient is None) == (also is None), name
        assert gradient is None or also is None or torch.equal(gradient, also), name


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [True, False])
@pytest.mark.parametrize(
    "kind",
    ["llama", "gpt2", *(pytest.param(kind, marks=pytest.mark.long) for kind in KINDS if kind not in ("llama", "gpt2"))],
)
def test_gradients_are_those_of_one_by_one(kind: str, adapted: bool) -> None:
    model = model_of(kind, adapted=adapted)
    other, batches = copy.deepcopy(model), batches_of()
    for _ in range(2):  # the second is added to the first
        assert by_layers(model, batches) == one_by_one(other, batches)
    assert_same(model, other)
    assert "forward" not in vars(model.base_model), "the model is as before"


def test_a_weight_that_is_embedding_and_head_has_one_sum_of_both_for_each_batch() -> None:
    model = model_of("llama", adapted=False, tie_word_embeddings=True)
    other, batches = copy.deepcopy(model), batches_of(5)
    assert by_layers(model, batches) == one_by_one(other, batches)
    assert_same(model, other)
    assert model.get_output_embeddings().weight.grad is model.get_input_embeddings().weight.grad


@pytest.mark.parametrize(("kind", "adapted"), [("llama", True), ("llama", False), ("gpt2", True)])
def test_under_autocast_too(kind: str, adapted: bool) -> None:
    model = model_of(kind, adapted=adapted)
    plain, other, batches = copy.deepcopy(model), copy.deepcopy(model), batches_of()
    loss = by_layers(model, batches, autocast=True)
    assert loss == one_by_one(other, batches, autocast=True) != one_by_one(plain, batches)
    assert_same(model, other)


def test_a_head_on_some_rows_at_a_time() -> None:
    model = model_of("llama", adapted=True)
    other, batches = copy.deepcopy(model), batches_of()
    assert by_layers(model, batches, 16) == one_by_one(other, batches, 16)
    assert_same(model, other)


@pytest.mark.process
@pytest.mark.parametrize(
    ("width", "layers", "count", "tensors", "share"),
    [(64, 3, 6, "400K", 2), pytest.param(128, 8, 8, "3M", 4, marks=pytest.mark.long)],
)
def test_within_a_budget_a_part_of_the_bytes_moves(
    width: int, layers: int, count: int, tensors: str, share: int, tmp_path: Path
) -> None:
    """The more batches a model runs, and the larger it is, the smaller the part: a quarter of
    the bytes of eight of each.
    """
    model = model_of("llama", adapted=False, width=width, num_hidden_layers=layers)
    other = copy.deepcopy(model)
    batches = [(tokens[:1, :16], labels[:1, :16]) for tokens, labels in batches_of(1) * count]
    moved = {}
    for run, trained in ((one_by_one, other), (by_layers, model)):
        with budget(tensors=tensors, page_dir=tmp_path).resizing() as bound:
            run(trained, batches)
            moved[run] = bound.report.read_bytes + bound.report.written_bytes
    assert_same(model, other)
    assert 0 < moved[by_layers] < moved[one_by_one] / share, moved


@pytest.mark.slow
def test_adapters_of_one_batch_are_trained_without_writing(tmp_path: Path) -> None:
    model = model_of("llama", adapted=True, width=128, num_hidden_layers=8)
    other, batches, written = copy.deepcopy(model), batches_of(4)[3:], {}
    for run, trained in ((one_by_one, other), (by_layers, model)):
        with budget(tensors="6M", page_dir=tmp_path).resizing() as bound:
            run(trained, batches)
            written[run] = bound.report.written_bytes
    assert_same(model, other)
    assert written[by_layers] == 0 < written[one_by_one], written


@pytest.mark.parametrize(
    ("kind", "settings", "why"),
    [
        ("gpt2", {"resid_pdrop": 0.1}, r"dropout \(dropout, resid_dropout\) draws random numbers"),
        ("llama", {"attention_dropout": 0.1}, r"dropout \(attention_dropout\) draws random numbers"),
        ("t5", {}, "not a single stack of layers"),
    ],
)
def test_what_cannot_run_so_is_named(kind: str, settings: dict[str, Any], why: str) -> None:
    if kind == "t5":
        model: Any = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(**shape_of(kind), vocab_size=VOCABULARY))
    else:
        model = model_of(kind, adapted=False, **settings)
    with pytest.raises(NotByLayersError, match=why):
        ByLayers(model, LearnedLoss(model))


def test_layers_that_share_weights_are_named() -> None:
    model = model_of("llama", adapted=False)
    layers = model.model.layers
    layers[1].mlp = layers[0].mlp
    with pytest.raises(NotByLayersError, match="its layers share weights"):
        by_layers(model, batches_of())


class _Between(torch.nn.Module):
    """What a model may do between two layers."""

    def __init__(self, layer: torch.nn.Module, what: str) -> None:
        super().__init__()
        self.layer, self.what = layer, what

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.what == "overwrites":
            hidden.mul_(1.5)
        given = self.layer(hidden, *args, **kwargs)
        return (given, given) if self.what == "does not return hidden rows" else given


@pytest.mark.parametrize("what", ["overwrites", "does not return hidden rows"])
def test_layers_that_do_more_are_named_and_nothing_is_left(what: str) -> None:
    model = model_of("llama", adapted=False)
    model.model.layers[1] = _Between(model.model.layers[1], what)
    with pytest.raises(NotByLayersError, match=f"layer 2 {what}"):
        by_layers(model, batches_of())
    assert all(gradient is None for gradient in gradients_of(model).values())


def test_a_model_that_looks_at_its_layers_otherwise_is_named() -> None:
    model = model_of("llama", adapted=False)
    norm = model.model.norm.forward
    seen: list[torch.Tensor] = []
    model.model.layers[0].register_forward_hook(lambda _, __, output: seen.append(output.detach()))
    model.model.norm.forward = lambda hidden: norm(hidden + seen[-1][:, : hidden.shape[1]] if seen else hidden)
    with pytest.raises(NotByLayersError, match="its head receives more"):
        by_layers(model, batches_of())


def test_numbers_that_are_drawn_are_noticed() -> None:
    model = model_of("llama", adapted=False)
    model.model.layers[0].register_forward_hook(
        lambda _, __, output: output + (torch.rand(()) < 2) if torch.is_grad_enabled() else output + 1
    )
    with pytest.raises(NotByLayersError, match="it draws random numbers"):
        by_layers(model, batches_of())
    assert all(gradient is None for gradient in gradients_of(model).values())
