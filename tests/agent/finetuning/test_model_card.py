"""What a result says of how it was made is what was asked for."""

from dataclasses import replace

from port_agent.finetuning.inputs.options import FinetuneOptions
from port_agent.finetuning.model_card import TrainedOn, model_card
from port_agent.finetuning.text.task import Task, TaskKind
from port_agent.packing import Quantization

OPTIONS = FinetuneOptions("/m/base", ("/home/me/notes.txt", "/home/me/b.jsonl"), "/o/mine", date="2026-03-09")
TRAINED = TrainedOn(train=1200, held_out=60, updates=1200, loss_before=3.25, loss_after=2.5)
CAUSAL = Task(TaskKind.CAUSAL_LM)


def test_an_adapters_card_has_the_settings_that_peft_keeps_nowhere() -> None:
    card = model_card(OPTIONS, CAUSAL, ("q_proj", "v_proj"), TRAINED)
    assert card.startswith("---\nbase_model: /m/base\nlibrary_name: peft\ntags:\n- lora\n---\n\n# mine\n")
    for said in (
        "| learns | the next token |",
        "| data | notes.txt, b.jsonl: 1,200 sequences, of at most 256 tokens |",
        "without borders",
        "| adapters | rank 8 on q_proj, v_proj; scaled by alpha 16 over the rank; dropout 0 |",
        "| frozen weights | as they are stored |",
        "weight decay 0; gradients clipped to a norm of 1 |",
        "| rate | 0.0002 after 3% of the updates, linear afterwards |",
        "| updates | 1,200 of 1 x 1 sequences; the loss is the mean over an update's learned tokens |",
        "| date in chat templates | 2026-03-09 |",
        "| held-out loss | 3.2500 before, 2.5000 after, of 60 sequences |",
    ):
        assert said in card
    assert "/home/me" not in card  # it is published with the adapter
    other = replace(OPTIONS, rslora=True, alpha=3.0, base=Quantization.NF4, dropout=0.1)
    card = model_card(other, CAUSAL, ("q_proj",), TRAINED)
    assert "alpha 3 over the root of the rank; dropout 0.1" in card and "| frozen weights | quantized to nf4 |" in card


def test_a_card_says_by_which_loss_pairs_of_answers_were_learned() -> None:
    cards = [
        model_card(asked, CAUSAL, (), TRAINED) for asked in (replace(OPTIONS, dpo=0.1), replace(OPTIONS, orpo=0.1))
    ]
    assert "two answers, by DPO with beta 0.1 relative to" in cards[0]
    assert (
        "| learns | the preferred of two answers with its prompt, and its odds over the other, by ORPO with beta 0.1 |"
        in cards[1]
    )
    assert all("the loss is the mean over an update's pairs" in card for card in cards)


def test_a_whole_models_card_has_no_adapters() -> None:
    trained = replace(TRAINED, loss_before=None)
    card = model_card(replace(OPTIONS, lora_rank=None, date=""), Task(TaskKind.MASKED_LM), (), trained)
    assert "library_name: transformers\n---" in card and "A model, all of whose weights were trained" in card
    assert not any(word in card for word in ("adapters", "frozen", "texts", "| date", "held-out"))
