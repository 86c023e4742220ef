"""Loss and gradient, some rows at a time, have the bits of the whole; only the rows that matter are computed."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from port_agent.finetuning.accumulation import head_loss
from port_agent.finetuning.accumulation.head_loss import LearnedLoss, chosen_log_probabilities, summed_loss
from port_agent.finetuning.inputs.options import FinetuneError
from port_agent.finetuning.text.sequence_file import IGNORED


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 16, 40, 97])
def test_loss_and_gradient_have_the_bits_of_the_whole(
    rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_loss, "_BLOCK_BYTES", 16 * 1000 * 4)
    torch.manual_seed(rows)
    first = torch.randn(rows, 1000, dtype=dtype) * 4
    labels = torch.randint(0, 1000, (rows,))
    labels[::3] = IGNORED
    labels[0] = 999
    whole = first.clone().requires_grad_()
    expected = F.cross_entropy(whole.float(), labels, reduction="sum")
    (expected / 37).backward()
    logits = (first.clone().requires_grad_() + 0).requires_grad_()
    assert torch.equal(summed_loss(chosen_log_probabilities(logits, labels), labels), expected.detach())
    assert torch.equal(logits, first)
    loss = summed_loss(chosen_log_probabilities(logits, labels, gradient_of=37), labels)
    assert not loss.requires_grad and torch.equal(loss, expected.detach())
    assert whole.grad is not None and torch.equal(logits.detach(), whole.grad)


LENGTH, VOCABULARY = 96, 500
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
KINDS = ("llama", "gemma2", "qwen2", "cohere", "granite", "gpt_neox")
"""Those with a cap or a scale behind their head among them."""


def small_model(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a language model with adapters in its attention."""
    torch.manual_seed(0)
    fitting = SHAPE if kind != "gpt_neox" else {k: v for k, v in SHAPE.items() if "head_dim" not in k and "kv" not in k}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fitting)).to(dtype)
    targets = ["query_key_value"] if kind == "gpt_neox" else ["q_proj", "v_proj"]
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    return adapted.eval()


def data(first_label: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels of two sequences; of the first none is learned, of the other those from a place on."""
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0] = IGNORED
    labels[1, :first_label] = IGNORED
    return tokens, labels


def test_texts_with_borders_have_the_loss_of_each_alone() -> None:
    model = small_model("llama")
    texts = data(0)[0][1].split((40, 7, 49))
    places = torch.cat([torch.arange(len(text)) for text in texts])[None]
    tokens = torch.cat(texts)[None]
    labels = torch.where(places == 0, IGNORED, tokens)
    loss = LearnedLoss(model)(tokens, labels, places)
    logits = model(input_ids=tokens, position_ids=places, use_cache=False).logits[0, :-1]
    assert torch.equal(loss, F.cross_entropy(logits, labels[0, 1:], reduction="sum"))
    alone = sum(LearnedLoss(model)(text[None], text[None]) for text in texts)
    torch.testing.assert_close(loss, alone)


def gradients(model: Any) -> list[torch.Tensor]:
    found = [p.grad for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_in_blocks_of_rows_is_the_models_own(kind: str) -> None:
    model = small_model(kind)
    tokens, labels = data(33)
    measured = LearnedLoss(model, head_rows=16)
    loss, found = measured(tokens, labels, gradient_of=7), gradients(model)
    again, same = measured(tokens, labels, gradient_of=7), gradients(model)
    assert measured._stands_alone, "else this test shows nothing"
    logits = model(input_ids=tokens).logits[:, 32:].reshape(-1, VOCABULARY)
    following = F.pad(labels[:, 1:], (0, 1), value=IGNORED)[:, 32:].reshape(-1)
    expected = F.cross_entropy(logits, following, reduction="sum")
    (expected / 7).backward()
    torch.testing.assert_close(loss, expected.detach())
    assert torch.equal(loss, again) and torch.equal(loss, measured(tokens, labels))
    for mine, other, whole in zip(found, same, gradients(model), strict=True):
        assert torch.equal(mine, other)
        torch.testing.assert_close(mine, whole, rtol=1e-4, atol=1e-6)


def test_it_is_the_same_step_as_the_same_blocks_in_plain_pytorch() -> None:
    model = small_model("llama", torch.bfloat16)
    tokens, labels = data(1)
    loss, found = LearnedLoss(model, head_rows=16)(tokens, labels, gradient_of=9), gradients(model)
    plain = model.get_base_model()
    hidden = plain.model(input_ids=tokens).last_hidden_state.reshape(-1, SHAPE["hidden_size"])
    following = F.pad(labels[:, 1:], (0, 1), value=IGNORED).reshape(-1)
    blocks = [plain.lm_head(block.detach().requires_grad_()) for block in hidden.split(16)]
    given = torch.cat(
        [_gradient(plain, block, of) for block, of in zip(hidden.split(16), following.split(16), strict=True)]
    )
    hidden.backward(given)
    assert torch.equal(loss, F.cross_entropy(torch.cat(blocks).float(), following, reduction="sum").detach())
    assert all(map(torch.equal, found, gradients(model)))


def _gradient(plain: Any, block: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    rows = block.detach().requires_grad_()
    loss = F.cross_entropy(plain.lm_head(rows).float(), following, reduction="sum") / 9
    (found,) = torch.autograd.grad(loss, rows)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_rows_at_once_are_the_step_that_one_would_write(dtype: torch.dtype) -> None:
    model = small_model("qwen2", dtype)
    tokens, labels = data(1)
    tokens, labels = tokens[1:], labels[1:]
    loss, found = LearnedLoss(model)(tokens, labels, gradient_of=5), gradients(model)
    following = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    logits = model(input_ids=tokens).logits.view(-1, VOCABULARY)
    expected = F.cross_entropy(logits.float(), following.view(-1), reduction="sum")
    (expected / 5).backward()
    assert torch.equal(loss, expected.detach()) and all(map(torch.equal, found, gradients(model)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2", "gemma2"])
def test_under_autocast_it_is_the_step_that_one_would_write(kind: str) -> None:
    model = small_model(kind)
    tokens, labels = data(1)
    following = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    learned = LearnedLoss(model, autocast=True)
    loss, found = learned(tokens, labels, gradient_of=5), gradients(model)
    assert not learned.may_run_in_blocks(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=tokens).logits.view(-1, VOCABULARY)
    expected = F.cross_entropy(logits.float(), following.view(-1), reduction="sum")
    (expected / 5).backward()
    assert torch.equal(loss, expected.detach()) and all(map(torch.equal, found, gradients(model)))
    assert not torch.equal(loss, LearnedLoss(model)(tokens, labels)), "else nothing was cast"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_that_nobody_asked_for_have_the_bits_of_all_rows_at_once(kind: str, dtype: torch.dtype) -> None:
    model = small_model(kind, dtype)
    tokens, labels = data(1)
    whole, expected = LearnedLoss(model)(tokens, labels, gradient_of=7), gradients(model)
    loss = LearnedLoss(model)
    assert loss.may_run_in_blocks(tokens)
    assert len(loss.run_in_blocks(32).blocks(2 * LENGTH)) > 2, "else this test shows nothing"
    assert torch.equal(loss(tokens, labels, gradient_of=7), whole) and all(map(torch.equal, gradients(model), expected))
    assert loss.rows_at_once(2 * LENGTH) <= 32


@pytest.mark.slow
def test_a_head_that_caps_is_counted_with_what_its_cap_saves_and_blocks_that_were_asked_for_are_kept() -> None:
    capped, product = LearnedLoss(small_model("gemma2")), LearnedLoss(small_model("llama"))
    alone = capped.bytes_at_once(64)
    assert capped.may_run_in_blocks(data(1)[0]) and product.may_run_in_blocks(data(1)[0])
    logits = 64 * VOCABULARY * torch.float32.itemsize
    assert alone + logits <= capped.bytes_at_once(64) <= alone + 3 * logits and product.bytes_at_once(64) == alone
    assert not LearnedLoss(small_model("llama"), head_rows=16).may_run_in_blocks(data(1)[0])


def _of_other_bits_in_the_last_places(logits: torch.Tensor) -> torch.Tensor:
    """As a kernel does whose vectors are of eight."""
    return torch.cat([logits[..., :-3] * 1.5, logits[..., -3:] * 1.5000001], -1)


def _of_the_whole_row(logits: torch.Tensor) -> torch.Tensor:
    return logits - logits.mean(-1, keepdim=True)


def _of_its_own_vocabulary(logits: torch.Tensor) -> torch.Tensor:
    return logits + torch.arange(VOCABULARY, dtype=logits.dtype)


@pytest.mark.parametrize("behind", [_of_other_bits_in_the_last_places, _of_the_whole_row, _of_its_own_vocabulary])
def test_what_follows_a_product_runs_in_blocks_only_where_it_works_by_elements(
    behind: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model("llama")
    forward = type(model.get_base_model()).forward

    @functools.wraps(forward)
    def followed(self: Any, *given: Any, **named: Any) -> Any:
        made = forward(self, *given, **named)
        made.logits = behind(made.logits)
        return made

    monkeypatch.setattr(type(model.get_base_model()), "forward", followed)
    loss = LearnedLoss(model)
    assert not loss.may_run_in_blocks(data(1)[0]) and loss.stands_alone(data(1)[0])


def test_a_head_that_is_trained_runs_at_once_or_is_refused() -> None:
    model = small_model("llama")
    model.get_base_model().lm_head.requires_grad_()
    tokens, labels = data(1)
    assert torch.isfinite(LearnedLoss(model)(tokens, labels, gradient_of=3))
    assert model.get_base_model().lm_head.weight.grad is not None
    with pytest.raises(FinetuneError, match=r"cannot run on 32 rows at a time.*leave out --head-rows"):
        LearnedLoss(model, head_rows=32)(tokens, labels)


@pytest.mark.parametrize(("first_label", "first_place"), [(1, 0), (32, 0), (33, 32), (70, 64)])
def test_rows_begin_at_the_bucket_of_the_first_learned_token(
    first_label: int, first_place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    chosen = head_loss.chosen_log_probabilities
    monkeypatch.setattr(
        head_loss,
        "chosen_log_probabilities",
        lambda logits, *given: asked.append(logits.shape[1]) or chosen(logits, *given),
    )
    LearnedLoss(small_model("llama"))(*data(first_label))
    assert asked == [2 * (LENGTH - first_place)]


@pytest.mark.parametrize(
    ("rows", "vocabulary", "largest"),
    [(256, 1000, 16), (255, 1000, 16), (17, 1000, 9), (7, 1000, 7), (5, 1000, 5), (256, 500, 32), (260, 500, 29)],
)
def test_blocks_of_logits_are_even_and_none_has_too_few_rows(
    rows: int, vocabulary: int, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 256 rows of TinyLlama's 32,000 tokens the last block was twice as large as the
    others: 22 MiB more at the peak.
    """
    monkeypatch.setattr(head_loss, "_BLOCK_BYTES", 16 * 1000 * 4)
    blocks = list(head_loss.row_blocks(rows, vocabulary))
    sizes = [stop - start for start, stop in blocks]
    assert [start for start, _ in blocks] == [0, *(stop for _, stop in blocks[:-1])] and blocks[-1][1] == rows
    assert max(sizes) == largest and min(sizes) >= min(rows, 4)
