"""A trained head runs for all micro-batches together: the gradients of one by one, its weight read once, and
else it is left as it was.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from port_agent import budget
from port_agent.finetuning.accumulation import trained_head
from port_agent.finetuning.accumulation.by_layers import ByLayers, Inputs
from port_agent.finetuning.accumulation.head_loss import LearnedLoss
from port_agent.finetuning.accumulation.trained_head import TrainedHead
from port_agent.finetuning.text.sequence_file import IGNORED
from port_planner.exactness import tiles
from tests.agent.finetuning.accumulation.small_models import VOCABULARY, model_of

LEARNED = 217
WIDTH = 32
TWO_TILES = 64 * WIDTH * 4


def batches_of(count: int, length: int = 40, vocabulary: int = VOCABULARY) -> list[Inputs]:
    """Return batches in which tokens come again, that which fills up among them; of each only the end is learned."""
    generator = torch.Generator().manual_seed(2)
    made = []
    for _ in range(count):
        tokens = torch.randint(0, vocabulary, (2, length), generator=generator)
        tokens[:, ::5] = 0
        labels = tokens.clone()
        labels[:, : length - 7] = IGNORED
        made.append((tokens, labels))
    return made


def gradients(model: Any, batches: list[Inputs], *, by_layers: bool) -> tuple[float, dict[str, torch.Tensor]]:
    loss = LearnedLoss(model)
    if by_layers:
        total = ByLayers(model, loss)(batches, LEARNED)
    else:
        total = sum(loss(tokens, labels, gradient_of=LEARNED).item() for tokens, labels in batches)
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == other.keys() and mine
    for name, gradient in mine.items():
        assert torch.equal(gradient.view(torch.int32), other[name].view(torch.int32)), name


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "kind", ["llama", "gpt2", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("qwen2", "phi3", "gpt_neox"))]
)
def test_in_tiles_the_gradients_are_those_of_one_by_one(kind: str, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained_head, "_TILE_BYTES", TWO_TILES)
    model = model_of(kind, adapted=False, width=WIDTH, tie_word_embeddings=tied)
    added: list[int] = []
    add = TrainedHead.add_gradients
    monkeypatch.setattr(
        TrainedHead, "add_gradients", lambda self, *given: (added.append(len(given[1])), add(self, *given))
    )
    other, batches = copy.deepcopy(model), batches_of(4)
    for count in (1, 2):  # the second update's are added to the first's
        mine, plain = (gradients(m, batches, by_layers=m is model) for m in (model, other))
        assert mine[0] == plain[0] and added == [4 if tied else 0] * count
        assert_equal(mine[1], plain[1])


def test_where_tiles_have_other_bits_the_head_runs_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainedHead, "_tiles_have_bits_of_whole", lambda self, rows: False)
    monkeypatch.setattr(TrainedHead, "add_gradients", lambda *_: pytest.fail("in tiles"))
    model = model_of("llama", adapted=False, tie_word_embeddings=True)
    other, batches = copy.deepcopy(model), batches_of(3)
    assert_equal(*(gradients(m, batches, by_layers=m is model)[1] for m in (model, other)))


@pytest.mark.parametrize(("kind", "tied"), [("gemma2", True), ("gemma3_text", True), ("llama", True)])
def test_a_head_or_a_table_that_does_more_is_another(kind: str, tied: bool) -> None:
    model = model_of(kind, adapted=False, tie_word_embeddings=tied)
    if kind == "llama":
        model.get_input_embeddings().max_norm = 1.0
    assert TrainedHead.of(model, LearnedLoss(model), batches_of(1)[0][0]) is None
    frozen = model_of("llama", adapted=True)
    assert TrainedHead.of(frozen.get_base_model(), LearnedLoss(frozen), batches_of(1)[0][0]) is None


def test_tiles_of_a_product_in_another_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama", adapted=False, tie_word_embeddings=True)
    head = TrainedHead.of(model, LearnedLoss(model), batches_of(1)[0][0])
    assert head is not None and head.works_for(64)
    monkeypatch.setattr(tiles, "same_bits", lambda one, other: torch.equal(one + 1e-3, other))
    assert head.works_for(64), "compared once"
    assert not head.works_for(63)


@pytest.mark.slow
def test_within_a_budget_the_weight_is_read_once_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = 4096
    monkeypatch.setattr(trained_head, "_TILE_BYTES", 64 << 10)
    moved, found = {}, {}
    for together in (True, False):
        model = model_of("llama", adapted=False, width=64, vocab_size=vocabulary, tie_word_embeddings=True)
        monkeypatch.setattr(TrainedHead, "works_for", lambda self, rows, together=together: together)
        with budget(tensors="1700K", page_dir=tmp_path).resizing() as bound:
            found[together] = gradients(model, batches_of(8, 16, vocabulary), by_layers=True)[1]
            moved[together] = bound.report.read_bytes + bound.report.written_bytes
    assert_equal(found[True], found[False])
    assert 0 < moved[True] < moved[False] / 2, moved
