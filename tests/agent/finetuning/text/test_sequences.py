"""Text packed without loss, completions learned alone, conversations in the tokenizer's own words."""

import copy
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import processors

from port_agent.finetuning.inputs.options import FinetuneError, FinetuneOptions
from port_agent.finetuning.text import records as text_records
from port_agent.finetuning.text.examples import examples_of
from port_agent.finetuning.text.sequence_file import IGNORED, SequenceFile
from port_agent.finetuning.text.sequences import Split, Vocabulary, masked
from port_agent.finetuning.text.sequences import split_sequences as split_into
from port_agent.finetuning.text.shapes import Message, Record, record_of
from port_agent.finetuning.text.task import Task, TaskKind
from port_agent.finetuning.text.tokenizing import load_tokenizer
from tests.agent.finetuning.tiny_model import TALK, TEMPLATE, TEXT, THOUGHTS, make_model

CAUSAL = Task(TaskKind.CAUSAL_LM)


def options(**changes: Any) -> FinetuneOptions:
    return FinetuneOptions("", ("",), "", **{"sequence_tokens": 16, "held_out": 0.0, **changes})


def split_sequences(
    records: list[Record], tokenizer: Any, options: FinetuneOptions, task: Task, valid: Sequence[Record] = ()
) -> Split:
    return split_into(records, tokenizer, options, task, SequenceFile.beside(Path(tempfile.gettempdir(), "out")), valid)


def test_texts_are_packed_to_full_sequences(tokenizer: Any) -> None:
    texts = [TEXT, TEXT * 3]
    found = split_sequences([Record(text=t) for t in texts], tokenizer, options(), CAUSAL).train
    whole = [t for text in texts for t in (*tokenizer(text)["input_ids"], tokenizer.eos_token_id)]
    assert sorted(list(s.tokens) for s in found) == sorted(whole[i : i + 16] for i in range(0, len(whole), 16))
    assert all(s.tokens == s.labels for s in found)


def test_a_text_without_tokens_is_left_out_of_those_with_labels(tokenizer: Any) -> None:
    bare = copy.deepcopy(tokenizer)
    bare._tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    task = Task(TaskKind.CLASSIFICATION, labels=("a", "b"))
    records = [Record(text="", label="a", place="line 1"), *(Record(text="to be", label=label) for label in "ab")]
    found = split_sequences(records, bare, options(), task)
    assert [sequence.label for sequence in sorted(found.train, key=lambda one: one.label or 0)] == [0, 1]
    assert "1 records are left out because they have no token to learn (the first: line 1)" in found.notes


def test_a_tokenizer_without_an_end_is_told(tokenizer: Any) -> None:
    endless = copy.deepcopy(tokenizer)
    endless.eos_token = None
    records = [Record(text=TEXT), Record(prompt="to", completion=" be")]
    notes = split_sequences(records, endless, options(), CAUSAL).notes
    assert "the tokenizer has no end token, so none is learned after 2 texts and completions" in notes


def test_an_encoder_reads_the_prompt_and_the_decoder_learns_the_completion(tokenizer: Any) -> None:
    records = [Record(prompt="to be or", completion=" not to be"), Record(prompt=TEXT * 9, completion="that")]
    split = split_sequences(records, tokenizer, options(sequence_tokens=40), Task(TaskKind.SEQ2SEQ_LM, 7))
    (found,) = split.train
    answer = [*tokenizer(" not to be")["input_ids"], tokenizer.eos_token_id]
    assert found.source is not None and list(found.source) == tokenizer("to be or")["input_ids"]
    assert list(found.tokens[: len(answer) + 1]) == [7, *answer] and len(found.tokens) == 32
    assert list(found.labels) == [IGNORED, *answer, *[IGNORED] * (31 - len(answer))] and split.skipped == 1


@pytest.mark.parametrize("record", [Record(text=TEXT), Record(messages=TALK)])
def test_without_a_prompt_an_encoder_has_nothing_to_read(record: Record, tokenizer: Any) -> None:
    with pytest.raises(FinetuneError, match="give records with prompt and completion"):
        split_sequences([record], tokenizer, options(), Task(TaskKind.SEQ2SEQ_LM, 7))


def test_a_long_text_is_read_in_parts(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_records, "CHUNK_CHARACTERS", 2 * len(TEXT) + 3)
    found = split_sequences([Record(text=TEXT * 5)], tokenizer, options(sequence_tokens=1 << 14), CAUSAL).train
    assert list(found[0].tokens) == [*tokenizer(TEXT * 5)["input_ids"], tokenizer.eos_token_id]


def test_with_borders_each_text_begins_anew_and_its_begin_is_not_learned(tokenizer: Any) -> None:
    texts = [TEXT, "to be", "", TEXT * 2, "or"]
    whole = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    expected = [(token, place) for tokens in whole for place, token in enumerate(tokens)]
    for length in (16, 7, len(expected)):
        records = [Record(text=text) for text in texts]
        asked = options(sequence_tokens=length, borders=True)
        train = split_sequences(records, tokenizer, asked, CAUSAL).train
        found = sorted((list(s.tokens), list(s.labels), list(s.places or ())) for s in train)
        parts = [expected[start : start + length] for start in range(0, len(expected), length)]
        wanted = []
        for part in parts:
            begin = part[0][1]
            places = [
                place - begin if all(p for _, p in part[1 : i + 1]) else place for i, (_, place) in enumerate(part)
            ]
            labels = [IGNORED if place == 0 else token for (token, _), place in zip(part, places, strict=True)]
            wanted.append(([token for token, _ in part], labels, places))
        assert found == sorted(one for one in wanted if set(one[1]) != {IGNORED})


def test_of_a_pair_both_answers_are_learned_behind_the_prompt(tokenizer: Any) -> None:
    record, _ = record_of({"prompt": "to be or", "chosen": " not to be", "rejected": TEXT})
    long, _ = record_of({"prompt": TEXT, "chosen": " be", "rejected": " " + TEXT * 3})
    asked = options(sequence_tokens=64, dpo=0.1)
    split = split_sequences([record, long], tokenizer, asked, CAUSAL)
    by_odds = split_sequences([record, long], tokenizer, options(sequence_tokens=64, orpo=0.1), CAUSAL)
    assert list(by_odds.train) == list(split.train)
    found = split.train[0] if len(split.train) == 1 else min(split.train, key=lambda one: len(one.tokens))
    assert found.rejected is not None and found.learned == 1 and len(found.tokens) == len(found.rejected.tokens)
    for sequence, answer in ((found, " not to be"), (found.rejected, TEXT)):
        assert tokenizer.decode([label for label in sequence.labels if label != IGNORED]) == f"{answer}</s>"
    shown = examples_of([found], tokenizer, (), 1)[0].parts
    assert [part.text for part in shown if part.learned] == [" not to be</s>", f"{TEXT}</s>"]


def test_both_answers_of_a_pair_are_learned_from_the_same_token_on(tokenizer: Any) -> None:
    """One joins letters of the prompt to a token of its own: the other's probability is that of the same text."""
    record, _ = record_of({"prompt": "that is the que", "chosen": "stion", "rejected": " mind"})
    found = split_sequences([record], tokenizer, options(sequence_tokens=64, dpo=0.1), CAUSAL).train[0]
    assert found.rejected is not None
    for sequence, learned in ((found, " question</s>"), (found.rejected, " que mind</s>")):
        assert tokenizer.decode([label for label in sequence.labels if label != IGNORED]) == learned


def test_a_record_without_a_token_to_learn_is_not_called_too_long(tokenizer: Any) -> None:
    empty, said = Record(prompt="", completion="", place="line 1"), Record(prompt="to", completion=" be")
    split = split_sequences([empty, said], tokenizer, options(), CAUSAL)
    assert len(split.train) == 1 and split.skipped == 0
    assert split.notes == ("1 records are left out because they have no token to learn (the first: line 1)",)
    with pytest.raises(FinetuneError, match="none of 1 records has a token to learn"):
        split_sequences([empty], tokenizer, options(), CAUSAL)


def test_pairs_and_single_answers_are_told_apart(tokenizer: Any) -> None:
    pair, _ = record_of({"prompt": "to", "chosen": " be", "rejected": " or"}, "line 3")
    single = Record(prompt="to", completion=" be", place="line 4")
    with pytest.raises(FinetuneError, match="line 3 has a chosen and a rejected answer; give --dpo or --orpo"):
        split_sequences([pair], tokenizer, options(), CAUSAL)
    with pytest.raises(FinetuneError, match="--dpo learns which of two answers is preferred, and line 4 has only one"):
        split_sequences([pair, single], tokenizer, options(dpo=0.1), CAUSAL)
    with pytest.raises(FinetuneError, match="--orpo learns which of two answers is preferred, and line 4 has only one"):
        split_sequences([pair, single], tokenizer, options(orpo=0.1), CAUSAL)
    with pytest.raises(FinetuneError, match="--dpo is only for models that continue text"):
        split_sequences([pair], tokenizer, options(dpo=0.1), Task(TaskKind.SEQ2SEQ_LM, 1))


def test_answers_that_are_cut_are_counted(tokenizer: Any) -> None:
    long, short = Record(prompt="to be", completion=TEXT), Record(prompt="to", completion=" be")
    split = split_sequences([long, short], tokenizer, options(), CAUSAL)
    whole = len(tokenizer("to be" + TEXT)["input_ids"]) + 1
    (note,) = split.notes
    assert note == (
        f"1 of 2 answers are cut at --seq-len 16, so {whole - 16} tokens are not learned; --seq-len "
        f"{-(-whole // 32) * 32} keeps all"
    )
    enough = options(sequence_tokens=-(-whole // 32) * 32)
    assert split_sequences([long, short], tokenizer, enough, CAUSAL).notes == ()


def test_an_answer_that_begins_within_a_token_is_counted(tokenizer: Any) -> None:
    records = [Record(prompt="to be o", completion="r", place="line 7"), Record(prompt="to", completion=" be")]
    (note,) = split_sequences(records, tokenizer, options(), CAUSAL).notes
    assert note.startswith("1 answers begin within a token") and "(the first: line 7)" in note


def test_instructions_are_a_conversation_where_there_is_a_template(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, _ = record_of({"instruction": "to be", "input": "or", "output": "not"})
    (found,) = split_sequences([record], tokenizer, options(sequence_tokens=512), CAUSAL).train
    assert tokenizer.decode(found.tokens).startswith("<s>user\nto be\n\nor</s><s>assistant\nnot</s>")
    monkeypatch.setattr(tokenizer, "chat_template", None)
    (found,) = split_sequences([record], tokenizer, options(sequence_tokens=512), CAUSAL).train
    assert "not</s>" in tokenizer.decode(found.tokens) and found.learned == len(tokenizer("not")["input_ids"]) + 1


def test_only_the_completion_is_learned(tokenizer: Any) -> None:
    record = Record(prompt="to be or", completion=" not to be")
    (found,) = split_sequences([record], tokenizer, options(sequence_tokens=64), CAUSAL).train
    learned = [label for label in found.labels if label != IGNORED]
    assert tokenizer.decode(learned) == " not to be</s>" and found.learned == len(learned)
    assert len(found.tokens) == 32, "filled up to a bucket"


def test_only_the_assistants_turns_are_learned(tokenizer: Any) -> None:
    (found,) = split_sequences([Record(messages=TALK)], tokenizer, options(sequence_tokens=128), CAUSAL).train
    learned = tokenizer.decode([label for label in found.labels if label != IGNORED])
    assert learned == "not to be</s>the question</s>"
    assert tokenizer.decode(found.tokens).startswith("<s>user\nto be or</s><s>assistant\nnot to be</s><s>user")


def test_a_prompt_that_fills_a_sequence_is_skipped_and_counted(tokenizer: Any) -> None:
    long, short = Record(prompt=TEXT * 5, completion="be"), Record(prompt="to", completion=" be")
    split = split_sequences([long, short], tokenizer, options(), CAUSAL)
    assert (len(split.train), split.skipped) == (1, 1)
    (note,) = split.notes
    enough = int(note.partition("16; --seq-len ")[2].partition(" ")[0])
    assert note.startswith("1 records are left out because their prompt alone fills --seq-len 16; ")
    assert split_sequences([long, short], tokenizer, options(sequence_tokens=enough), CAUSAL).notes == ()
    with pytest.raises(
        FinetuneError, match=f"1 of 1 records have a prompt of 16 tokens or more; --seq-len {enough} keeps all"
    ):
        split_sequences([long], tokenizer, options(), CAUSAL)


def test_held_out_sequences_are_none_of_those_trained_on(tokenizer: Any) -> None:
    records = [Record(prompt=TEXT[:i], completion=" be") for i in range(1, 21)]
    split = split_sequences(records, tokenizer, options(held_out=0.25, sequence_tokens=64), CAUSAL)
    assert (len(split.train), len(split.held_out)) == (15, 5)
    assert not any(sequence in split.train for sequence in split.held_out)
    assert split == split_sequences(records, tokenizer, options(held_out=0.25, sequence_tokens=64), CAUSAL)
    assert split != split_sequences(records, tokenizer, options(held_out=0.25, sequence_tokens=64, seed=1), CAUSAL)


def test_what_is_held_out_may_be_data_of_its_own(tokenizer: Any) -> None:
    records = [Record(prompt=TEXT[:i], completion=" be") for i in range(1, 5)]
    own = [Record(prompt="to", completion=" not")]
    split = split_sequences(records, tokenizer, options(held_out=0.5, sequence_tokens=64), CAUSAL, own)
    assert len(split.train) == 4
    assert ["not" in tokenizer.decode(sequence.tokens) for sequence in split.held_out] == [True]
    with pytest.raises(FinetuneError, match="no sequence of --valid is left"):
        split_sequences(
            records, tokenizer, options(sequence_tokens=64), CAUSAL, [Record(prompt=TEXT * 9, completion="x")]
        )


def test_conversations_that_the_template_refuses_are_counted_and_the_first_is_named(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_users_first = "{% if messages[0].role != 'user' %}{{ raise_exception('a user first') }}{% endif %}"
    monkeypatch.setattr(tokenizer, "chat_template", only_users_first + TEMPLATE)
    system = Record(messages=(Message("system", "be brief"), *TALK), place="line 3")
    wide = options(sequence_tokens=128)
    split = split_sequences([system, Record(messages=TALK), system], tokenizer, wide, CAUSAL)
    assert (len(split.train), split.skipped, split.unwritten) == (1, 0, 2)
    assert split.first_unwritten == "a user first (line 3)"
    with pytest.raises(FinetuneError, match="chat template does not write 1 of 1 records, the first: a user first"):
        split_sequences([system], tokenizer, wide, CAUSAL)


def test_a_conversation_of_several_sequences_is_skipped_where_none_has_room(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", THOUGHTS)
    short = split_sequences([Record(messages=TALK)], tokenizer, options(sequence_tokens=32), CAUSAL)
    assert (len(short.train), short.skipped) == (1, 0), "the first answer has room"
    assert short.notes[0].startswith(
        "1 later answers of conversations are left out because the text before each fills --seq-len"
    )
    with pytest.raises(FinetuneError, match="1 of 1 records have a prompt of 4 tokens or more"):
        split_sequences([Record(messages=TALK)], tokenizer, options(sequence_tokens=4), CAUSAL)


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    (make_model(tmp_path) / "tokenizer.json").write_text("{")
    with pytest.raises(FinetuneError, match=r"the tokenizer of .* cannot be read"):
        load_tokenizer(tmp_path)


def test_answers_keep_their_length_where_texts_are_packed_to_a_shorter_one(tokenizer: Any) -> None:
    answer = Record(prompt="to be", completion=" or not to be that is the question" * 4)
    given = [Record(text=TEXT * 3), answer]
    asked = options(sequence_tokens=16, answer_tokens=64)
    split = split_sequences(given, tokenizer, asked, CAUSAL)
    alone = split_sequences([answer], tokenizer, options(sequence_tokens=64), CAUSAL)
    packed = split_sequences(given[:1], tokenizer, options(sequence_tokens=16), CAUSAL)
    found, wanted = (sorted(list(s.tokens) for s in some) for some in (split.train, [*packed.train, *alone.train]))
    assert found == wanted and split.notes == alone.notes
    assert max(len(s.tokens) for s in packed.train) == 16 < max(len(s.tokens) for s in alone.train) <= 64


def test_a_text_with_a_label_that_is_cut_is_counted(tokenizer: Any) -> None:
    long = "to be or not to be that is the question " * 3
    whole = len(tokenizer(long)["input_ids"])
    given = [Record(text="to be", label="a"), Record(text=long, label="b")]
    task = Task(TaskKind.CLASSIFICATION, labels=("a", "b"))
    split = split_sequences(given, tokenizer, options(sequence_tokens=16, held_out=0.0), task)
    assert max(len(s.tokens) for s in split.train) == 16
    kept = -(-whole // 32) * 32
    assert split.notes == (
        f"1 texts are cut at --seq-len 16, so {whole - 16} tokens are not read; --seq-len {kept} keeps all",
    )
    assert split_sequences(given, tokenizer, options(sequence_tokens=kept, held_out=0.0), task).notes == ()


def test_a_label_that_is_not_trained_is_named(tokenizer: Any) -> None:
    known, other = Record(text="to be", label="a"), Record(text="or", label="b", place="line 2")
    with pytest.raises(FinetuneError, match=r"the label 'b' \(line 2\) is not one of the trained labels"):
        split_sequences([known], tokenizer, options(), Task(TaskKind.CLASSIFICATION, labels=("a",)), [other])


MASKED = Task(TaskKind.MASKED_LM)


def test_a_text_for_an_encoder_is_cut_in_parts_of_which_other_tokens_are_masked_each_time(tokenizer: Any) -> None:
    found = split_sequences([Record(text=TEXT * 3)], tokenizer, options(), MASKED).train
    whole = tokenizer(TEXT * 3)["input_ids"]
    assert sorted(list(s.tokens) for s in found) == sorted(whole[i : i + 16] for i in range(0, len(whole), 16))
    first = found[0]
    vocabulary = Vocabulary(tokenizer.vocab_size, tokenizer.mask_token_id)
    seen = [masked(first, vocabulary, str(n)) for n in range(200)]
    assert masked(first, vocabulary, "7") == seen[7] and len({tuple(s.labels) for s in seen}) > 50
    hidden = kept = learned = 0
    for sequence in seen:
        places = [i for i, label in enumerate(sequence.labels) if label != IGNORED]
        assert len(places) == sequence.learned == max(1, round(0.15 * (len(first.tokens) - 1))) and 0 not in places
        assert all(sequence.labels[i] == first.tokens[i] for i in places)
        assert all(
            s == t for i, (s, t) in enumerate(zip(sequence.tokens, first.tokens, strict=True)) if i not in places
        )
        learned += len(places)
        hidden += sum(sequence.tokens[i] == tokenizer.mask_token_id for i in places)
        kept += sum(sequence.tokens[i] == first.tokens[i] for i in places)
    assert 0.7 < hidden / learned < 0.9 and 0.05 < kept / learned < 0.2


@pytest.mark.parametrize(
    ("changed", "most", "mask", "said"),
    [
        ({"sample": "to be"}, 512, 5, "is an encoder and writes no text; leave out --sample"),
        ({}, 12, 5, "--seq-len 16 is more than the 12 tokens that this model reads at once"),
        ({}, 512, None, "has no mask token, so no words can be masked; give records a label"),
    ],
)
def test_what_an_encoder_cannot_do_is_refused(changed: dict[str, str], most: int, mask: int | None, said: str) -> None:
    reads = SimpleNamespace(model_max_length=most, mask_token_id=mask)
    with pytest.raises(FinetuneError, match=said):
        split_sequences([Record(text=TEXT)], reads, options(**changed), MASKED)
