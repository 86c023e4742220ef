"""One concept, one word: `docs/glossary.md` names the terms; what they replaced does not come back."""

import io
import keyword
import re
import tokenize
from functools import cache

import pytest

from tests.house import ROOT, product_files

BANNED_WORDS = {
    "ears": "listener",
    "fate": "decision",
    "fates": "decisions",
    "foresight": "prefetcher",
    "victim": "eviction policy, evicted",
    "victims": "eviction policy",
    "bury": "reclaim",
    "bench": "measurement worker",
    "surroundings": "run conditions, context",
    "belt": "limit",
    "spare": "headroom",
    "dear": "expensive",
    "dearer": "costlier",
    "recipe": "rematerialization, update ops",
    "recipes": "heuristics",
    "trial": "dry run",
    "heard": "received",
    "told": "options, reported",
    "stretches": "slice, span",
    "tripwire": "monitor",
    "piecewise": "tiled",
    "asker": "client",
    "answerer": "server",
    "vain": "idle",
}
"""Words that no identifier of the product has, and what says it instead."""

BANNED_BEGINNINGS = ("LEAST_", "MOST_", "_LEAST_", "_MOST_")
"""Of constants: bounds are MIN and MAX."""

BANNED_PHRASES = (r"\b(?:Tell|Say) whether\b", r"\bdear(?:er|est)\b")
"""Of docstrings and messages."""

PARTICIPLES = (
    "Made", "Shown", "Planned", "Prepared", "Tried", "Moved", "Told", "Heard", "Said", "Given", "Asked", "Led", "Valued",
    "Refused", "Listed", "Sliced", "Divided", "Restricted", "Captured", "Measured", "Differing", "Tokenized", "Rewritten",
    "Ended", "Joining", "Placing", "Merging", "Coarsening", "Decoding", "Tracing", "Lowering", "Planning",
)  # fmt: skip
"""What no class is called."""


def words_of(name: str) -> list[str]:
    """Return the words of an identifier, in small letters."""
    parts = (re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", part) for part in name.split("_"))
    return [word.lower() for words in parts for word in words]


@cache
def sources() -> dict[str, str]:
    """Return the product's modules, by path."""
    return {str(path.relative_to(ROOT)): path.read_text() for path in product_files() if "firmware" not in path.parts}


@cache
def identifiers(path: str) -> frozenset[str]:
    """Return the names in a module's code."""
    tokens = tokenize.generate_tokens(io.StringIO(sources()[path]).readline)
    return frozenset(t.string for t in tokens if t.type == tokenize.NAME and not keyword.iskeyword(t.string))


def terms() -> list[str]:
    """Return the terms of the glossary."""
    return re.findall(r"^- \*\*([^*]+)\*\*:", (ROOT / "docs" / "glossary.md").read_text(), re.M)


@cache
def vocabulary() -> str:
    """Return all that the product says, identifiers as words, in small letters."""
    names = (" ".join(words_of(name)) for path in sources() for name in identifiers(path))
    return "\n".join((*names, *(text.lower() for text in sources().values())))


@pytest.mark.parametrize("path", sources())
def test_no_identifier_has_a_word_that_was_replaced(path: str) -> None:
    found = {name: BANNED_WORDS[word] for name in identifiers(path) for word in words_of(name) if word in BANNED_WORDS}
    assert not found, f"{path}: {found}"
    bounds = {name for name in identifiers(path) if name.startswith(BANNED_BEGINNINGS)}
    assert not bounds, f"{path}: MIN and MAX instead of {sorted(bounds)}"


def test_no_class_is_called_by_a_participle() -> None:
    found = {
        name: path
        for path, text in sources().items()
        for name in re.findall(r"^ *class _*(\w+)", text, re.M)
        if name in PARTICIPLES
    }
    assert not found


@pytest.mark.parametrize("phrase", BANNED_PHRASES)
def test_no_text_has_a_phrase_that_was_replaced(phrase: str) -> None:
    found = [path for path, text in sources().items() if re.search(phrase, text)]
    assert not found


def test_each_term_is_used() -> None:
    assert len(terms()) >= 60
    used = vocabulary()
    assert not [term for term in terms() if term.lower() not in used and term.lower().replace("-", " ") not in used]
