"""`export`: write a model, with an adapter of `finetune` if given, as a file of another program's format."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from port_agent.cli.arguments import readable_folder
from port_planner.base.units import format_bytes

_TYPES = ("f32", "f16", "bf16", "q8_0")

_EPILOG = """\
result: one file with the model's weights, its settings, its tokenizer and its chat template, as llama.cpp's own
converter writes them. It appears once it is complete. Matrices have the type of the model's files, or --type; vectors are in 32
bits. With --adapter the file has the weights of `port-agent merge`, for which free space of the model's size is needed.

models: LlamaForCausalLM (Llama 3, SmolLM2), Qwen2ForCausalLM and Qwen3ForCausalLM with byte-level BPE. Everything
else is refused by name; in that case:
  port-agent merge notes-adapter --out merged
  python convert_hf_to_gguf.py merged --outfile model.gguf        (of llama.cpp)

It needs the package gguf: pip install 'port-agent[gguf]'.

examples:
  port-agent export --gguf SmolLM2-135M --out smollm2.gguf
  port-agent export --gguf SmolLM2-135M --adapter notes-adapter --type q8_0 --out notes.gguf
"""


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `export` to `commands`."""
    parser = commands.add_parser(
        "export",
        help="write a model and its adapter as a GGUF file",
        description="Write a model of transformers, with an adapter merged into it if given, as one GGUF file.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--gguf",
        type=readable_folder,
        required=True,
        metavar="DIR",
        help="directory of the model to write as GGUF",
    )
    parser.add_argument("--adapter", type=readable_folder, metavar="DIR", help="directory that finetune wrote")
    parser.add_argument(
        "-o", "--out", type=Path, required=True, metavar="FILE", help="the file, which must not exist yet"
    )
    parser.add_argument("--type", choices=_TYPES, help="type of the matrices (default: that of the model's files)")
    parser.add_argument("--json", action="store_true", help="print a line of JSON at the end")
    parser.set_defaults(run=_export)


def _export(arguments: argparse.Namespace) -> int:
    """Write the file; return the exit code. Raises FinetuneError."""
    from port_agent.finetuning.inputs.model_files import check_model_files, check_not_there

    check_not_there(arguments.out)  # checked before torch and transformers are loaded, which takes seconds
    check_model_files(arguments.gguf)
    from port_agent.system.torch_loading import load_torch_library

    load_torch_library()
    from port_agent.intercept.dispatch import light_dynamo

    light_dynamo.hold_place()  # nothing is compiled here
    from port_agent.cli.progress import StageBar
    from port_agent.finetuning.export.gguf_file import GgufType, export_gguf

    def note(text: str) -> None:
        print(f"port-agent: {text}", file=sys.stderr)

    kind = None if arguments.type is None else GgufType(arguments.type)
    with StageBar(("writing",), quiet=arguments.json) as bar:
        outcome = export_gguf(
            arguments.gguf, arguments.out, kind, arguments.adapter, lambda share: bar.update("writing", share), note
        )
    if arguments.json:
        print(json.dumps({"event": "finished", **asdict(outcome)}))
        return 0
    print(f"{outcome.out}: {format_bytes(outcome.nbytes)}, {outcome.weights} weights, matrices in {outcome.type}")
    return 0
