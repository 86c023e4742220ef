"""The process that holds the tokenizer: `python -m port_agent.finetuning.text.tokenizer_process OPTIONS WHAT`,
arguments of WHAT pickled on its input.

It loads transformers as if torch were not installed, which takes 75 MiB instead of 250. Its output is the result of
WHAT, or the FinetuneError that it raised.
"""

import contextlib
import importlib.util
import pickle
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from typing import Any

import msgspec

from port_agent.finetuning.inputs.options import FinetuneError, FinetuneOptions
from port_agent.finetuning.text.tokenizing import TokenizerHere


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    """Hide torch: transformers checks for it once, and remembers the result."""
    found = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "torch" else found(name, package)

    importlib.util.find_spec = find_spec
    try:
        yield
    finally:
        importlib.util.find_spec = found


def main() -> None:
    """Answer the request; see the module's docstring."""
    tokenizer = TokenizerHere(msgspec.json.decode(sys.argv[1], type=FinetuneOptions))
    arguments = pickle.load(sys.stdin.buffer)  # written by our own process
    answer: object
    try:
        with _without_torch():
            import transformers

        logging: Any = transformers.utils.logging
        logging.set_verbosity_error()
        answer = getattr(tokenizer, sys.argv[2])(*arguments)
    except FinetuneError as error:
        answer = error
    except ImportError as error:
        answer = FinetuneError(
            f"fine-tuning language models needs transformers and peft ({error.name} is missing): pip install "
            "'port-agent[llm]'"
        )
    pickle.dump(answer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
