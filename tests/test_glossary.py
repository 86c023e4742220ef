"""One concept, one word: `docs/glossary.md` names the terms; what they replaced does not come back."""

import ast
import inspect
import io
import keyword
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from tests.docs.pages import documents, sentences
from tests.house import ROOT, parse, product_files, tree_of

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
    "piece": "tile, block, slice, segment, chunk",
    "pieces": "tiles, blocks, slices, segments, chunks",
    "prepared": "captured",
    "room": "budget, limit, free, headroom",
    "rooms": "budgets, limits",
    "said": "message, reported",
    "say": "report",
}
"""Words that no identifier of the product has, and what says it instead."""

OLD_NAMES = frozenset({"in_pieces", "summed_in_pieces", "port_guard_pause_and_say"})
"""Keys of a bundle's manifest, which older versions wrote, and a function of the preloaded library."""

BANNED_BEGINNINGS = ("LEAST_", "MOST_", "_LEAST_", "_MOST_")
"""Of constants: bounds are MIN and MAX."""

BANNED_PHRASES = (
    r"\b(?:Tell|Say) whether\b",
    r"\bdear(?:er|est)\b",
    r"\b(?:leaves?|left) (?:\S+ )?away\b",  # leave out
    r"\b(?:begins?|began|starts?) anew\b",  # start again
    r"\bfor ever\b",
    r"\b(?:at|to) hand\b",
    r"\bwho waits\b",
    r"\bis let go\b",  # is freed
    r"\bwhat there is\b",
    r"\ba number that is none\b",
    r"\bfollows what changes\b",
    r"\bmake (?:the bundle|it) again\b",  # recreate
    r"\b(?:is|are) to be (?!there)\w+ed\b",  # must be
    r"(?<![Tt]here )\b(?:is|are) no (?!longer\b|more\b|less\b|better\b|larger\b)\w",  # is not a
    r"(?<![Tt]here )\b(?:is|are) none\b",
    r"\banew\b",  # again
    r"\bsays? nothing of\b",  # does not describe
    r"\b(?:go|goes|going) on from\b",  # continue from
    r"\b[Tt]ake note\b",  # record
    r"\bTake in\b",  # record
    r"\bof Python's\b",  # a Python value
    r"\bnext to nothing\b",  # almost nothing
    r"\bequally many\b",  # the same number
    r"\ball the same\b(?! \w)",
    r"\bnot at all any more\b",  # never
    r"\btrusted no more\b",  # no longer trusted
    r'^ *(?:r?""")?(?:Read|Ask|Pause|Watch|Speak|Train|Accept|Trust|Be) (?:\w+ )?no more\b',  # stop reading
    r'"""(?:Have|Be|Whom|Whoever) ',
    r"\bin (?:\w+ )?pieces\b",  # in tiles, in chunks
    r"\bpiece by piece\b",  # tile by tile, chunk by chunk
    r"\b[Pp]repared job\b",  # captured job
    r"\bpacking moves?\b",  # search step
)
"""Of docstrings, comments and messages: other languages' idioms, and what was replaced in all of them."""

MAX_SENTENCE_WORDS = 30
"""Of a message, a help text, a docstring or a document."""

FRAGMENTS = ("And ", "Or ", "Of ", "By ", "Its ", "Likewise", "Such as ", "As in ")
"""Beginnings of a docstring that needs another line to be understood."""

FIELD_FRAGMENTS = (
    "At", "How", "In", "It", "On", "So", "That", "Those", "Until", "What", "When", "Where", "Who", "Whom", "Whose", "With", "Without",
)  # fmt: skip
"""First words of the docstring of a constant or a field that is no noun phrase."""

LISTED = 6
"""Commas of a document's sentence that is a list."""

DOCUMENT_PHRASES = (
    *BANNED_PHRASES,
    r"^(?:Who|Whom|Whoever|What) [^?\[]+$",
    r"\b(?:goes?|went) on\b",
    r"\banew\b",
    r"\b[Ww]hat is (?:told|said|there)\b",
)
"""Of other languages, and relative clauses without a noun at the beginning of a sentence."""

PARTICIPLES = (
    "Made", "Remade", "Shown", "Told", "Heard", "Said", "Given", "Led", "Rewritten", "Differing", "Joining", "Placing",
    "Merging", "Coarsening", "Decoding", "Tracing", "Lowering", "Planning", "Introducing",
)  # fmt: skip
"""What no class is called, beside all single words in -ed."""


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
    names = identifiers(path) - OLD_NAMES
    found = {name: BANNED_WORDS[word] for name in names for word in words_of(name) if word in BANNED_WORDS}
    assert not found, f"{path}: {found}"
    bounds = {name for name in identifiers(path) if name.startswith(BANNED_BEGINNINGS)}
    assert not bounds, f"{path}: MIN and MAX instead of {sorted(bounds)}"


def test_no_class_is_called_by_a_participle() -> None:
    found = {
        name: path
        for path, text in sources().items()
        for name in re.findall(r"^ *class _*(\w+)", text, re.M)
        if name in PARTICIPLES or re.fullmatch("[A-Z][a-z]+ed", name)
    }
    assert not found


@cache
def flowing(path: Path) -> str:
    """Return a module's docstrings and comments, each in one line, so that the end of a line parts no phrase."""
    comments = re.sub(r"\n *# ", " ", path.read_text())
    return "\n".join((*(" ".join(text.split()) for text in docstrings(path)), *re.findall(r"# .*", comments)))


@pytest.mark.parametrize("phrase", BANNED_PHRASES)
def test_no_text_has_a_phrase_that_was_replaced(phrase: str) -> None:
    found = [
        path for path, text in sources().items() if re.search(phrase, text) or re.search(phrase, flowing(ROOT / path))
    ]
    assert not found


@pytest.mark.parametrize("folder", ["benchmarks", "deploy", "docs", "examples"])
def test_no_other_program_has_a_phrase_that_was_replaced(folder: str) -> None:
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / folder).rglob("*.py"))}
    found = [
        (path, phrase)
        for path, text in texts.items()
        for phrase in BANNED_PHRASES
        if re.search(phrase, text) or re.search(phrase, flowing(ROOT / path))
    ]
    assert texts and not found


def test_each_term_is_used() -> None:
    assert len(terms()) >= 60
    used = vocabulary()
    assert not [term for term in terms() if term.lower() not in used and term.lower().replace("-", " ") not in used]


def _text_of(node: ast.AST) -> str:
    """Return a message as it is written, a placeholder for what is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text_of(part) if isinstance(part, ast.Constant) else "X" for part in node.values)
    return ""


def messages(path: Path) -> Iterator[str]:
    """Yield the messages of errors that a module raises, and the help of its options."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from map(_text_of, node.exc.args)
        elif isinstance(node, ast.Call):
            yield from (_text_of(keyword.value) for keyword in node.keywords if keyword.arg == "help")


def docstrings(path: Path) -> Iterator[str]:
    """Yield a module's docstrings, those of constants and fields too, code as one word."""
    for node in ast.walk(tree_of(path) if path in product_files() else parse(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield re.sub(r"`[^`]*`", "X", inspect.cleandoc(node.value.value))


def docstrings_of_fields(path: Path) -> Iterator[str]:
    """Yield the docstrings of a module's constants and fields."""
    for node in ast.walk(tree_of(path)):
        body = getattr(node, "body", None)
        for field, found in pairwise(body if isinstance(body, list) else ()):
            if isinstance(field, ast.Assign | ast.AnnAssign) and isinstance(found, ast.Expr):
                text = found.value
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    yield text.value


def comments_in_c(path: Path) -> Iterator[str]:
    """Yield the sentences of a C file's comments, without tables and formulas, which are indented."""
    for comment in re.findall(r"/\*(.*?)\*/", path.read_text(), re.S):
        text = re.sub(r"\n\s*\*? ?", "\n", comment.strip())
        for part in re.split(r"\n\s*\n", re.sub(r"^  .*$", "", text, flags=re.M)):
            yield from re.split(r"(?<=[.;:!?])\s+", " ".join(part.split()))


def prose(docstring: str) -> list[str]:
    """Return the paragraphs of a docstring without lists and usage, which are indented."""
    return [part for part in re.split(r"\n\s*\n", docstring) if "\n  " not in part]


@pytest.mark.parametrize("path", product_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_of_messages_and_docstrings_are_short_and_whole(path: Path) -> None:
    texts = (*messages(path), *(part for text in docstrings(path) for part in prose(text)))
    assert not [text for text in docstrings(path) if text.startswith(FRAGMENTS)]
    sentences = (sentence for text in texts for sentence in re.split(r"(?<=[.;:!?])\s", text))
    assert not [sentence for sentence in sentences if len(sentence.split()) > MAX_SENTENCE_WORDS]


@pytest.mark.parametrize("path", product_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_field_is_described_by_a_noun(path: Path) -> None:
    assert not [text for text in docstrings_of_fields(path) if text.split()[0] in FIELD_FRAGMENTS]


@pytest.mark.parametrize("folder", ["agent/port_agent", "firmware"])
def test_comments_in_c_are_plain_english(folder: str) -> None:
    files = [path for suffix in ("c", "h") for path in sorted((ROOT / folder).rglob(f"*.{suffix}"))]
    wrong = [
        f"{path.relative_to(ROOT)}: {sentence}"
        for path in files
        for sentence in comments_in_c(path)
        if len(sentence.split()) > MAX_SENTENCE_WORDS or any(re.search(phrase, sentence) for phrase in DOCUMENT_PHRASES)
    ]
    assert files and not wrong


def test_documents_are_plain_english() -> None:
    """No sentence is long, but for a list of many things, and other languages' idioms stay out, as in messages."""
    spoken = [page for page in documents() if page.name != "glossary.md"]
    wrong = [
        f"{page.relative_to(ROOT)}: {sentence}"
        for page in spoken
        for sentence in sentences(page)
        if (len(re.findall(r"\S*\w\S*", sentence)) > MAX_SENTENCE_WORDS and sentence.count(",") < LISTED)
        or any(re.search(phrase, sentence) for phrase in DOCUMENT_PHRASES)
    ]
    assert not wrong
