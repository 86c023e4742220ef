"""The process that answers: `python -m port_agent.cli.chat OPTIONS`, with the options as JSON. `port-agent chat` starts
it.
"""

import sys

import msgspec

from port_agent.cli.terminal import terminal
from port_agent.finetuning.inputs.chat_options import ChatOptions
from port_planner.base.errors import ExitCode, PortError

_ASK = "> "


def main() -> int:
    """Answer each line of the input until the input ends; return the exit code."""
    options = msgspec.json.decode(sys.argv[1], type=ChatOptions)
    console = terminal(stderr=True)
    try:
        from port_agent.finetuning.chat import Chat

        chat = Chat(options, lambda text: console.print(f"port-agent: {text}", soft_wrap=True, markup=False))
        while line := _line():
            answer = chat.answer(line, _write)
            _write("\n")
            pace = answer.tokens / answer.seconds
            console.print(f"port-agent: {answer.tokens} tokens, {pace:.1f} per second", highlight=False)
    except PortError as error:
        console.print(f"port-agent: {error}", soft_wrap=True, markup=False)
        return error.exit_code
    return ExitCode.DONE


def _line() -> str:
    """Return the next question, or "" at the end of the input."""
    if sys.stdin.isatty():
        sys.stderr.write(_ASK)
        sys.stderr.flush()
    return sys.stdin.readline().strip()


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
