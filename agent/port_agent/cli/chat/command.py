"""`chat`: talk with a model from a directory, with or without an adapter made by `finetune`, inside a budget.

This process checks the arguments, then becomes the process that answers (`port_agent.cli.chat`), as `exec` does.
"""

import argparse
import os
from pathlib import Path

import msgspec

from port_agent.cli.arguments import readable_folder, size, whole_number
from port_agent.cli.exec import add_budget_options, run_in_budget
from port_agent.finetuning.inputs.chat_options import ChatOptions
from port_agent.finetuning.inputs.model_files import check_model_files
from port_agent.system.python_process import few_kernels_environment

_EPILOG = """\
Each line is a question, and its answer appears as it is generated. An empty line or Ctrl-D ends the conversation. It is
written in the tokenizer's own chat template. Weights stay in their files: a smaller --ram costs time and changes no answer.

examples:
  port-agent chat SmolLM2-135M-Instruct --ram 500M
  port-agent chat TinyLlama-1.1B --adapter chats-adapter --ram 600M
  echo "How do I descale it?" | port-agent chat TinyLlama-1.1B --adapter chats-adapter --ram 600M --greedy
"""


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `chat` to `commands`."""
    parser = commands.add_parser(
        "chat",
        help="talk with a language model, inside a memory budget",
        description="Talk with a transformers language model from its directory.",
        epilog=_EPILOG,
    )
    parser.add_argument("model", type=readable_folder, help="directory with config.json, safetensors and tokenizer")
    parser.add_argument(
        "--adapter", type=readable_folder, metavar="DIR", help="adapter that finetune made for this model"
    )
    parser.add_argument(
        "--ram", type=size, required=True, metavar="SIZE", help="memory of the whole process, e.g. 600M"
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="system prompt")
    parser.add_argument(
        "--tokens", type=whole_number(1), default=512, metavar="N", help="most tokens of an answer (default 512)"
    )
    parser.add_argument(
        "--greedy",
        action="store_true",
        help="always choose the likeliest token (default: what the model's generation_config.json says)",
    )
    parser.add_argument("--seed", type=whole_number(0), default=0, metavar="N", help="seed of sampling (default 0)")
    add_budget_options(parser)
    parser.set_defaults(run=_chat, tensors=None)


def _chat(arguments: argparse.Namespace) -> int:
    """Become the process that answers.

    Raises UsageError and FinetuneError before anything is loaded.
    """
    check_model_files(arguments.model)
    a = arguments
    options = ChatOptions(
        str(a.model.absolute()),
        None if a.adapter is None else str(a.adapter.absolute()),
        a.system,
        a.tokens,
        a.greedy,
        a.seed,
    )
    os.environ |= few_kernels_environment()
    program = ["port_agent.cli.chat", msgspec.json.encode(options).decode()]
    run_in_budget(arguments, program, module=True, ours=True, name=f"chat {Path(options.model).name}")
