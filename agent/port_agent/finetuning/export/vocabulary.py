"""A tokenizer in GGUF's form: tokens, merges, and the name of the splitting that comes first, whose
rules are in llama.cpp's code.

Byte-level BPE with one of those splittings is written. Anything else is rejected by name.
"""

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from port_agent.finetuning.export.shape import CONVERTER
from port_agent.finetuning.inputs.options import FinetuneError

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""The splitting that Llama 3 and Qwen 2 share; they differ in how many digits stay together."""

_BYTES, _BYTES_AND_WORDS, _DIGITS = "bytes", "bytes and words", "digits"
"""Steps of a splitting that are not a pattern."""


@dataclass(frozen=True, slots=True)
class Splitting:
    """How text is split before merges: patterns and other steps in order, whether words that are tokens stay whole, and
    the normalization before.
    """

    steps: tuple[str, ...]
    whole_words: bool = False
    normalizer: str | None = None

    def pre_tokenizer(self) -> dict[str, Any]:
        """Return the steps as a tokenizer.json has them."""
        made = [_written_step(step) for step in self.steps]
        return made[0] if len(made) == 1 else {"type": "Sequence", "pretokenizers": made}


SPLITTINGS = {
    "gpt-2": Splitting((_BYTES_AND_WORDS,)),
    "smollm": Splitting((_DIGITS, _BYTES_AND_WORDS)),
    "llama-bpe": Splitting((_WORDS % r"\p{N}{1,3}", _BYTES), whole_words=True),
    "qwen2": Splitting((_WORDS % r"\p{N}", _BYTES), normalizer="NFC"),
}
"""Patterns that split text, by llama.cpp's names; llama.cpp has them in its code."""


class TokenKind(enum.IntEnum):
    """GGUF's kinds of tokens: learned, written only by special tokens' names, given by a user, and not in use."""

    NORMAL = 1
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """`splitting`: llama.cpp's name for how text is split.

    `begins`, `ends`: whether a text begins and ends with the tokenizer's mark. `marks`: numbers of
    special tokens, by GGUF's names.
    """

    splitting: str
    tokens: tuple[str, ...]
    kinds: tuple[TokenKind, ...]
    merges: tuple[str, ...]
    begins: bool
    ends: bool
    marks: Mapping[str, int]
    template: str | None
    normalized: bool
    """Whether the tokenizer first composes characters (NFC), which llama.cpp does not."""


def vocabulary_of(tokenizer: Any, size: int) -> GgufVocabulary:
    """Return a tokenizer's vocabulary for a model of `size` tokens. Raises FinetuneError."""
    written = _written(tokenizer)
    model = written["model"]
    splitting = _splitting(written)
    words = {number: (word, TokenKind.NORMAL) for word, number in model["vocab"].items()}
    for added in written["added_tokens"]:
        words[added["id"]] = added["content"], TokenKind.CONTROL if added["special"] else TokenKind.USER_DEFINED
    if max(words) >= size:
        raise FinetuneError(
            f"the tokenizer has a token {max(words)}, and the model {size} tokens; use the tokenizer that came with it"
        )
    found = [words.get(number, (f"[PAD{number}]", TokenKind.UNUSED)) for number in range(size)]
    read, begin, end = tokenizer("a")["input_ids"], tokenizer.bos_token_id, tokenizer.eos_token_id
    marks = {"bos": begin, "eos": end, "unknown": tokenizer.unk_token_id, "padding": tokenizer.pad_token_id}
    return GgufVocabulary(
        splitting,
        tuple(word for word, _ in found),
        tuple(kind for _, kind in found),
        tuple(merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]),
        begin is not None and read[:1] == [begin],
        end is not None and read[-1:] == [end],
        {name: number for name, number in marks.items() if number is not None},
        _template(tokenizer.chat_template),
        written["normalizer"] is not None,
    )


def _template(given: str | Mapping[str, str] | None) -> str | None:
    """Return a tokenizer's chat template; of several, the default one."""
    return given if given is None or isinstance(given, str) else given.get("default")


def _written(tokenizer: Any) -> dict[str, Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    written: dict[str, Any] = {} if backend is None else json.loads(backend.to_str())
    model = written.get("model", {})
    if model.get("type") != "BPE" or model.get("byte_fallback") or not model.get("merges"):
        kind = "SentencePiece's BPE" if model.get("byte_fallback") else model.get("type", type(tokenizer).__name__)
        raise FinetuneError(
            f"the tokenizer is {kind}, and export writes byte-level BPE (Llama 3, SmolLM, Qwen); convert the model "
            f"with {CONVERTER}"
        )
    return written


def _splitting(written: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for how a tokenizer splits text. Raises FinetuneError if it has no name there."""
    before = written["pre_tokenizer"] or {}
    steps = tuple(_step(step) for step in before.get("pretokenizers", [before]))
    whole = bool(written["model"].get("ignore_merges"))
    normalizer = (written["normalizer"] or {}).get("type")
    for name, known in SPLITTINGS.items():
        if (steps, whole) == (known.steps, known.whole_words) and normalizer in (None, known.normalizer):
            return name
    raise FinetuneError(
        f"the tokenizer splits text by {json.dumps(before)[:200]}, which is not one of llama.cpp's "
        f"{', '.join(SPLITTINGS)}; convert the model with {CONVERTER}"
    )


def _step(step: Mapping[str, Any]) -> str:
    match step:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": words}:
            return _BYTES_AND_WORDS if words else _BYTES
        case {"type": "Digits", "individual_digits": True}:
            return _DIGITS
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
            return str(pattern)
    return "other"


def _written_step(step: str) -> dict[str, Any]:
    if step == _DIGITS:
        return {"type": "Digits", "individual_digits": True}
    if step in (_BYTES, _BYTES_AND_WORDS):
        return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": step != _BYTES}
    return {"type": "Split", "pattern": {"Regex": step}, "behavior": "Isolated", "invert": False}
