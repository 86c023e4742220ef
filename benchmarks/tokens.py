"""Compare what `finetune` learns of data with what trl learns, token by token and mask by mask:
`python -m benchmarks.tokens`.

Tokenizers of four kinds, trained here (byte-level BPE, SentencePiece's with and without a space before a text,
WordPiece and Unigram), read prompts with completions; the first of them writes conversations in the chat
templates that trl ships, which are those of the models' own repositories. Both get the same entry, as prompt and
completion; `--tokenizer` adds those of real models, with their own templates. Each case is the same, refused by
one of both by name, or different for a reason that is derived from the tokens; one that nothing explains is an
error, and the exit code is 1.

trl is in the group `dev`. Nothing is downloaded.
"""

import argparse
import collections
import datetime
import json
import string
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets  # type: ignore[import-untyped]
import transformers
import trl
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from trl.trainer.sft_trainer import SFTTrainer

from port_agent.finetuning.inputs.options import FinetuneError, FinetuneOptions
from port_agent.finetuning.text.conversations import UnwrittenError
from port_agent.finetuning.text.sequence_file import IGNORED
from port_agent.finetuning.text.sequences import SequenceMaker
from port_agent.finetuning.text.shapes import record_of
from port_agent.finetuning.text.task import Task, TaskKind

_TEXT = Path(__file__).parents[1] / "examples/shakespeare/tinyshakespeare.txt"
_TEXT_CHARACTERS = 120_000
_ALPHABET = sorted(set(string.printable) - set(string.whitespace))  # digits and signs that the text does not have
_MARKS = ("<pad>", "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>")
_VOCABULARY = 2000
_LONGEST = 4096
_UNEXPLAINED = "unexplained"
_MANY_NOT_OF_TEXT = ("_training", "vl", "idefics", "llava", "vision", "diffusion")
"""In names of templates that trl changed, or that are of models that see."""

Entry = dict[str, Any]

PAIRS: tuple[Entry, ...] = (
    {"prompt": "2+2=", "completion": "4"},
    {"prompt": "Translate to German: cat\nAnswer:", "completion": " Katze"},
    {"prompt": "def add(a, b):\n", "completion": "    return a + b\n"},
    {"prompt": "The peak is", "completion": "s of memory"},
    {"prompt": "Question: what is a page?\n\n", "completion": "What a storage is while it lies in a file."},
    {"prompt": "", "completion": "A text alone."},
)


def _said(role: str, content: str, **more: object) -> Entry:
    return {"role": role, "content": content, **more}


_HELLO = _said("assistant", "Hello to you.")
TALKS: dict[str, Entry] = {
    "one turn": {"prompt": [_said("user", "Hi there")], "completion": [_HELLO]},
    "system": {"prompt": [_said("system", "Be kind."), _said("user", "Hi there")], "completion": [_HELLO]},
    "two turns": {
        "prompt": [_said("user", "Hi there"), _HELLO, _said("user", "Again")],
        "completion": [_said("assistant", "Hello once more.")],
    },
    "spaces": {"prompt": [_said("user", "Hi there ")], "completion": [_said("assistant", "  Hello \n")]},
    "thoughts": {
        "prompt": [_said("user", "2+2")],
        "completion": [_said("assistant", "4", reasoning_content="Two and two is four.")],
    },
    "two users": {"prompt": [_said("user", "Hi"), _said("user", "there")], "completion": [_HELLO]},
}


@dataclass(frozen=True, slots=True)
class Learned:
    """The tokens of a sequence, and which of them are learned."""

    tokens: tuple[int, ...]
    learned: tuple[bool, ...]


def made_tokenizers() -> Iterator[tuple[str, Any]]:
    """Yield tokenizers of the usual kinds, trained on the beginning of the example's Shakespeare."""
    marks = list(_MARKS)
    byte_level = Tokenizer(models.BPE())
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    yield from _trained(
        "byte-level BPE",
        byte_level,
        trainers.BpeTrainer(vocab_size=_VOCABULARY, special_tokens=marks, initial_alphabet=alphabet),
    )
    for name, first in (("SentencePiece, a space before a text", [normalizers.Prepend("▁")]), ("SentencePiece", [])):
        chunks = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
        chunks.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
        yield from _trained(
            name, chunks, trainers.BpeTrainer(vocab_size=_VOCABULARY, special_tokens=marks, initial_alphabet=_ALPHABET)
        )
    unigram = Tokenizer(models.Unigram())
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    yield from _trained(
        "Unigram",
        unigram,
        trainers.UnigramTrainer(
            vocab_size=_VOCABULARY, special_tokens=marks, unk_token="<unk>", initial_alphabet=_ALPHABET
        ),
    )
    words = Tokenizer(models.WordPiece(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    yield from _trained(
        "WordPiece",
        words,
        trainers.WordPieceTrainer(vocab_size=_VOCABULARY, special_tokens=marks, initial_alphabet=_ALPHABET),
    )


def _trained(name: str, tokenizer: Tokenizer, trainer: Any) -> Iterator[tuple[str, Any]]:
    """Yield a tokenizer as it is, then with the mark that begins a text, then with the marks that begin and end it."""
    tokenizer.train_from_iterator([_TEXT.read_text()[:_TEXT_CHARACTERS]], trainer)
    numbers = [(mark, tokenizer.token_to_id(mark)) for mark in ("<s>", "</s>")]
    for what, template in (("", "$A"), (", begins a text", "<s> $A"), (", begins and ends a text", "<s> $A </s>")):
        tokenizer.post_processor = processors.TemplateProcessing(single=template, pair="$A $B", special_tokens=numbers)
        yield (
            f"{name}{what}",
            transformers.PreTrainedTokenizerFast(
                tokenizer_object=Tokenizer.from_str(tokenizer.to_str()),
                bos_token="<s>",
                eos_token="</s>",
                pad_token="<pad>",
                unk_token="<unk>",
            ),
        )


def templates() -> Iterator[tuple[str, str]]:
    """Yield the chat templates of models that trl ships."""
    for path in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja")):
        if not any(part in path.stem for part in _MANY_NOT_OF_TEXT):
            yield path.stem, path.read_text()


def ours(entry: Entry, tokenizer: Any) -> list[Learned]:
    """Return what `finetune` learns from an entry, without padding. Raises UnwrittenError, FinetuneError."""
    options = FinetuneOptions("", (), "", sequence_tokens=_LONGEST, date=datetime.date.today().isoformat())
    record, _ = record_of(entry)
    found = []
    for sequence in SequenceMaker(tokenizer, options, Task(TaskKind.CAUSAL_LM)).of_record(record):
        if sequence is not None:
            length = max(place for place, label in enumerate(sequence.labels) if label != IGNORED) + 1
            learned = tuple(label != IGNORED for label in sequence.labels[:length])
            found.append(Learned(tuple(sequence.tokens[:length]), learned))
    return found


def theirs(entry: Entry, tokenizer: Any) -> Learned:
    """Return what trl's SFTTrainer prepares from an entry; raise what it raises."""
    trainer: Any = SimpleNamespace(
        chat_template=tokenizer.chat_template, _tokenizer=tokenizer, completion_only_loss=True
    )
    settings: Any = SimpleNamespace(
        dataset_num_proc=None,
        dataset_text_field="text",
        assistant_only_loss=False,
        max_length=None,
        truncation_mode="keep_start",
        shuffle_dataset=False,
    )
    data = datasets.IterableDataset.from_generator(lambda: iter([json.loads(json.dumps(entry))]))
    prepared = SFTTrainer._prepare_dataset(trainer, data, tokenizer, settings, False, None, "train")
    (row,) = list(prepared)
    return Learned(tuple(row["input_ids"]), tuple(label != IGNORED for label in row["labels"]))


def reason(mine: list[Learned], other: Learned, tokenizer: Any) -> str:
    """Return why both differ, derived from their tokens, or ""."""
    (one,) = mine[-1:]  # of a conversation that is written in parts, the one of the last answer
    if one == other:
        return ""
    end = tokenizer.eos_token_id
    if one.tokens == (*other.tokens, end):
        return "finetune learns an end that the template leaves out"
    if (*one.tokens, end) == other.tokens:
        return "trl learns an end twice"
    if one.tokens == other.tokens and all(
        theirs or not mine for mine, theirs in zip(one.learned, other.learned, strict=True)
    ):
        return "trl learns an end of the prompt, which has other tokens alone"
    asked = tokenizer.decode([t for t, learned in zip(one.tokens, one.learned, strict=True) if not learned])
    if asked not in tokenizer.decode(other.tokens):
        return "trl trains behind another prompt than the template asks with"
    return _UNEXPLAINED


def outcome(entry: Entry, tokenizer: Any) -> str:
    """Return the result of a case in words."""
    try:
        mine = ours(entry, tokenizer)
    except (UnwrittenError, FinetuneError) as error:
        return f"refused here: {error}"
    try:
        other = theirs(entry, tokenizer)
    except Exception as error:  # whatever a template or trl makes of it
        return f"trl ends with {type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return reason(mine, other, tokenizer) or "same"


def cases(most: int | None, folders: Iterable[Path] = ()) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the name of each case, and what runs it; `most`: of the templates, `folders`: of further tokenizers."""
    made = dict(made_tokenizers())
    for folder in folders:
        given = made[folder.name] = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        for what, talk in TALKS.items() if given.chat_template else ():
            yield f"{folder.name}: {what}", lambda e=talk, t=given: outcome(e, t)  # type: ignore[misc]
    for name, tokenizer in made.items():
        for entry in PAIRS:
            yield f"{name}: {entry['prompt']!r}", lambda e=entry, t=tokenizer: outcome(e, t)  # type: ignore[misc]
    tokenizer = next(iter(made.values()))
    for name, template in list(templates())[:most]:
        for what, talk in TALKS.items():

            def run(talk: Entry = talk, template: str = template) -> str:
                tokenizer.chat_template = template
                return outcome(talk, tokenizer)

            yield f"{name}: {what}", run


def main() -> int:
    """Print each case that differs, and the number of each result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--templates", type=int, metavar="N", help="the first N of them alone")
    parser.add_argument(
        "--tokenizer", nargs="+", type=Path, default=[], metavar="DIR", help="directories with further tokenizers"
    )
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each case")
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    counts: collections.Counter[str] = collections.Counter()
    for name, run in cases(arguments.templates, arguments.tokenizer):
        said = run()
        counts[said.partition(":")[0]] += 1
        if arguments.json:
            print(json.dumps({"case": name, "outcome": said}), flush=True)
        elif said != "same":
            print(f"{name} -> {said}", flush=True)
    for said, count in counts.most_common():
        print(f"{count:5} {said}", file=sys.stderr)
    return int(counts[_UNEXPLAINED] > 0)


if __name__ == "__main__":
    sys.exit(main())
