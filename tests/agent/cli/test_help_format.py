"""Help texts: short usage lines, one word for each kind of value."""

from pathlib import Path

from port_agent.cli.arguments import CommandParser, readable_folder, size, whole_number
from port_agent.cli.help_format import MAX_OPTIONS


def parser_of(options: int) -> CommandParser:
    parser = CommandParser(prog="port-agent try", epilog="examples:\n  port-agent try one\n  port-agent try two\n")
    parser.add_argument("bundle_file")
    parser.add_argument("--ram", type=size, required=True)
    for number in range(options):
        parser.add_argument(f"--option-{number}", type=whole_number(1), help="a number")
    return parser


def test_many_options_are_one_word_of_the_usage_but_for_those_that_must_be_given() -> None:
    many = parser_of(MAX_OPTIONS).format_usage()  # one more by -h
    assert many == "usage: port-agent try BUNDLE-FILE --ram SIZE [options]\n"
    few = parser_of(MAX_OPTIONS - 1).format_usage()
    assert "[--option-0 N]" in few and "[options]" not in few


def test_a_value_is_called_by_what_reads_it() -> None:
    parser = parser_of(0)
    for name, kind in (("--folder", readable_folder), ("--place", Path), ("--own-name", None)):
        parser.add_argument(name, type=kind) if kind else parser.add_argument(name)
    text = parser.format_help()
    assert "--folder DIR" in text and "--place PATH" in text and "--own-name OWN-NAME" in text


def test_lines_of_examples_stay_and_a_long_line_is_wrapped() -> None:
    parser = parser_of(0)
    parser.description = "word " * 60
    text = parser.format_help()
    assert "examples:\n  port-agent try one\n  port-agent try two\n" in text
    assert max(map(len, text.splitlines())) <= 100
