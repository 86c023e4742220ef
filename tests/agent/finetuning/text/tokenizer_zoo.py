"""Tokenizers built as those of the families of language models are, on a small vocabulary."""

from collections.abc import Callable
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "def add(a, b):\n    return a + b\n\n\tif x == 12:\n        print('2+2= 4')\n",
    "to be or not to be, that is the question: whether tis nobler in the mind to suffer the slings and arrows\n",
    "Ein süßer Käse kostet 3,50 €; 日本語のテキスト、もっと。 🙂🙂 naïve café\n",
    "question: what is 2+2= 4? answer: four, and no   more    spaces\n",
]
_SPECIAL = ["<unk>", "<s>", "</s>"]
_TIKTOKEN = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def _byte_level(*, trimmed: bool) -> Tokenizer:
    """As GPT-2's, whose tokens say nothing of the space that they begin with where it is trimmed."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = processors.ByteLevel(trim_offsets=trimmed)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=500, special_tokens=_SPECIAL, initial_alphabet=alphabet)
    )
    return made


def _tiktoken() -> Tokenizer:
    """As Llama 3's and Qwen's."""
    made = _byte_level(trimmed=False)
    split = pre_tokenizers.Split(_TIKTOKEN, "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


def _sentencepiece(*, ends: bool = False) -> Tokenizer:
    """As Llama 2's and TinyLlama's: a space before each text, no words, bytes for what is not known."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    latin = [text for text in CORPUS if text.isascii()]
    made.train_from_iterator(latin, trainers.BpeTrainer(vocab_size=600, special_tokens=[*_SPECIAL, *bytes_]))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.pre_tokenizer = None
    end = " </s>" if ends else ""
    made.post_processor = processors.TemplateProcessing(single=f"<s> $A{end}", special_tokens=[("<s>", 1), ("</s>", 2)])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def _metaspace() -> Tokenizer:
    """As Mistral's: a space before the first word of a text alone."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=_SPECIAL))
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


def _unigram() -> Tokenizer:
    """Return a unigram tokenizer like those of T5 and XLM-R, which marks the end of a text."""
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.train_from_iterator(
        CORPUS, trainers.UnigramTrainer(vocab_size=200, special_tokens=_SPECIAL, unk_token="<unk>")
    )
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    return made


def _wordpiece() -> Tokenizer:
    """As BERT's: spaces are no tokens."""
    text = " ".join(CORPUS).lower()
    parts = [*_SPECIAL, *sorted({*text.split()}), *sorted({*text}), *(f"##{letter}" for letter in sorted({*text}))]
    vocabulary = {part: number for number, part in enumerate(dict.fromkeys(parts))}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    return made


_MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": lambda: _byte_level(trimmed=False),
    "byte level, trimmed": lambda: _byte_level(trimmed=True),
    "tiktoken": _tiktoken,
    "sentencepiece": _sentencepiece,
    "sentencepiece that ends texts": lambda: _sentencepiece(ends=True),
    "metaspace": _metaspace,
    "unigram": _unigram,
    "wordpiece": _wordpiece,
}
NAMES = tuple(_MAKERS)


def made(name: str) -> Any:
    """Return a tokenizer as transformers has it."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_MAKERS[name](),
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer
