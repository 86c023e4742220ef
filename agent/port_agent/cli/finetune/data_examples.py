"""Training examples shown to a person: text that is only read is dim, and text that is learned is in colour."""

from collections.abc import Iterable

from rich.text import Text

from port_agent.finetuning.text.examples import Example, ExamplePart

_READ, _LEARNED = "dim", "bold green"
_MAX_READ, _MAX_LEARNED = 160, 240
"""Characters shown of text that is read, and of text that is learned."""


def example_text(example: Example) -> Text:
    """Return a sequence with its learned part in colour."""
    text = Text()
    for part in example.parts:
        text.append(part.text, _LEARNED if part.learned else _READ)
    if example.label is not None:
        text.append(f"\nlabel: {example.label}", _LEARNED)
    return text


def example_texts(examples: Iterable[Example]) -> Iterable[Text]:
    """Yield sequences, each below its number and the number of its learned characters."""
    for number, example in enumerate(examples, 1):
        learned = sum(len(part.text) for part in example.parts if part.learned)
        whole = sum(len(part.text) for part in example.parts)
        amount = f"{learned} of {whole} characters are learned" if example.label is None else "the label is learned"
        yield Text(f"-- sequence {number}: {amount}")
        yield example_text(example)


def short_example(example: Example) -> Text:
    """Return the end of the part that is read first, and the beginning of the part that is learned."""
    place = next((place for place, part in enumerate(example.parts) if part.learned), len(example.parts))
    read = "".join(part.text for part in example.parts[:place])
    learned = example.parts[place].text if place < len(example.parts) else ""
    parts = (ExamplePart(_end(read), learned=False), ExamplePart(_begin(learned), learned=True))
    return example_text(Example(parts, example.label))


def _end(text: str) -> str:
    return text if len(text) <= _MAX_READ else f"...{text[-_MAX_READ:]}"


def _begin(text: str) -> str:
    return text if len(text) <= _MAX_LEARNED else f"{text[:_MAX_LEARNED]}..."
