"""The tokenizer of a GGUF file, as a tokenizer of transformers.

Byte-level BPE is made from the file, as `port_agent.finetuning.export.vocabulary` writes it. For any other tokenizer,
the file lacks rules, so the original tokenizer is needed; its tokens are compared with the file's.
"""

import json
from collections.abc import Mapping
from typing import Any

from port_agent.finetuning.export.vocabulary import SPLITTINGS, Splitting, TokenKind
from port_agent.finetuning.inputs.options import FinetuneError
from port_planner.base.units import shown

_KEY = "tokenizer.ggml."
_KNOWN = frozenset(
    (
        "model", "pre", "tokens", "token_type", "scores", "merges", "add_bos_token", "add_eos_token", "add_space_prefix",
        "bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id", "eot_token_id", "eom_token_id",
    )
)  # fmt: skip
_ADDED = (TokenKind.CONTROL, TokenKind.USER_DEFINED)
_MARKS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Names of special tokens in GGUF, by their names in transformers."""
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
_BEGINNING = "llama-bpe"
"""Kinds of splitting whose tokenizers begin texts with their mark unless the file says otherwise."""


def named_ends(given: Mapping[str, Any]) -> list[int]:
    """Return the tokens that a file names as the end of a text or of an answer."""
    found = (given.get(f"{_KEY}{name}_token_id") for name in ("eos", "eot", "eom"))
    return list(dict.fromkeys(number for number in found if number is not None))


def tokenizer_from(given: Mapping[str, Any], longest: int) -> Any:
    """Return the tokenizer that a file's settings describe, for texts of up to `longest` tokens.

    Raises FinetuneError for a tokenizer whose rules are not in the file.
    """
    kind, name = given.get(f"{_KEY}model"), given.get(f"{_KEY}pre")
    splitting = SPLITTINGS.get(name or "")
    if kind != "gpt2" or splitting is None:
        raise FinetuneError(
            f"the file's tokenizer is {shown(str(kind))} with the splitting {shown(str(name))}, and decode makes gpt2 "
            f"with {', '.join(SPLITTINGS)}; give the original model's: --tokenizer DIR"
        )
    odd = next((key for key in given if key.startswith(_KEY) and key.removeprefix(_KEY) not in _KNOWN), None)
    if odd is not None or given.get(f"{_KEY}add_space_prefix"):
        raise FinetuneError(
            f"the file's tokenizer has {shown(odd or f'{_KEY}add_space_prefix')}, which decode does not read; give the "
            "original model's: --tokenizer DIR"
        )
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokens = given[f"{_KEY}tokens"]
    marks = {f"{mark}_token": given.get(f"{_KEY}{key}_token_id") for mark, key in _MARKS.items()}
    made = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer.from_str(
            json.dumps(_written(given, splitting, begins=given.get(f"{_KEY}add_bos_token", name == _BEGINNING)))
        ),
        model_max_length=longest,
        clean_up_tokenization_spaces=False,
        **{mark: tokens[number] for mark, number in marks.items() if number is not None},
    )
    made.chat_template = given.get("tokenizer.chat_template")
    return made


def check_tokens(tokenizer: Any, given: Mapping[str, Any], origin: str) -> None:
    """Raise FinetuneError, naming a token, if a tokenizer's tokens differ from a file's."""
    tokens, kinds = given[f"{_KEY}tokens"], given[f"{_KEY}token_type"]
    mine = tokenizer.convert_ids_to_tokens(list(range(min(len(tokens), len(tokenizer)))))
    mine += [None] * (len(tokens) - len(mine))
    for number, (token, kind, other) in enumerate(zip(tokens, kinds, mine, strict=True)):
        if kind != TokenKind.UNUSED and token != other:
            raise FinetuneError(
                f"token {number} is {shown(token)} in the file and {shown(str(other))} in {origin}; give the tokenizer "
                "of the model that the file was made of"
            )


def _written(given: Mapping[str, Any], splitting: Splitting, *, begins: bool) -> dict[str, Any]:
    """Return a tokenizer.json. `begins`: whether texts begin with the mark of that name."""
    tokens, kinds = given[f"{_KEY}tokens"], given[f"{_KEY}token_type"]
    used = [number for number, kind in enumerate(kinds) if kind != TokenKind.UNUSED]
    added = [
        {
            "id": number,
            "content": tokens[number],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kinds[number] == TokenKind.CONTROL,
        }
        for number in used
        if kinds[number] in _ADDED
    ]
    first = given.get(f"{_KEY}bos_token_id") if begins else None
    last = given.get(f"{_KEY}eos_token_id") if given.get(f"{_KEY}add_eos_token") else None
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None if splitting.normalizer is None else {"type": splitting.normalizer},
        "pre_tokenizer": splitting.pre_tokenizer(),
        "post_processor": _marked(tokens, first, last),
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "vocab": {tokens[number]: number for number in used},
            "merges": given[f"{_KEY}merges"],
            "ignore_merges": splitting.whole_words,
        },
    }


def _marked(tokens: list[str], first: int | None, last: int | None) -> dict[str, Any]:
    """Return the processor that adds marks to a text, and to a pair of texts."""
    before, after = ([] if n is None else [{"SpecialToken": {"id": tokens[n], "type_id": 0}}] for n in (first, last))
    if not before and not after:
        return {**_BYTE_LEVEL, "trim_offsets": False}
    texts = [{"Sequence": {"id": name, "type_id": 0}} for name in ("A", "B")]
    marks = [n for n in (first, last) if n is not None]
    return {
        "type": "TemplateProcessing",
        "single": [*before, texts[0], *after],
        "pair": [*before, texts[0], *after, *before, texts[1], *after],
        "special_tokens": {tokens[n]: {"id": tokens[n], "ids": [n], "tokens": [tokens[n]]} for n in marks},
    }
