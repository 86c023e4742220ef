"""What is learned is in colour and what is read is dim; before a run it is cut to some lines."""

from port_agent.cli.finetune.data_examples import example_texts, short_example
from port_agent.finetuning.text.examples import Example, ExamplePart

EXAMPLE = Example(
    (
        ExamplePart("to be ", learned=False),
        ExamplePart("or not", learned=True),
        ExamplePart(" that", learned=False),
        ExamplePart(" is", learned=True),
    )
)


def test_what_is_learned_is_in_colour() -> None:
    said, text = example_texts([EXAMPLE])
    assert said.plain == "-- sequence 1: 9 of 20 characters are learned" and text.plain == "to be or not that is"
    assert [(text.plain[s.start : s.end], s.style) for s in text.spans] == [
        ("to be ", "dim"),
        ("or not", "bold green"),
        (" that", "dim"),
        (" is", "bold green"),
    ]
    said, text = example_texts([Example((ExamplePart("to be", learned=False),), "good")])
    assert said.plain.endswith("the label is learned") and text.plain == "to be\nlabel: good"


def test_before_a_run_it_is_short() -> None:
    assert short_example(EXAMPLE).plain == "to be or not"
    long = Example((ExamplePart("a" * 999, learned=False), ExamplePart("b" * 999, learned=True)))
    assert short_example(long).plain == "..." + "a" * 160 + "b" * 240 + "..."
    assert short_example(Example((ExamplePart("to be", learned=False),), "good")).plain == "to be\nlabel: good"
