"""`decode`: write a quantized model of another program as a directory of a floating-point model."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from port_agent.cli.arguments import readable_folder
from port_planner.base.units import format_bytes

_TYPES = ("f32", "f16", "bf16")

_EPILOG = """\
input: a GGUF file of Llama, Qwen2 or Qwen3 in any type that the package gguf decodes (Q8_0, Q4_K, Q6_K and others), and
model directories whose weights are quantized by bitsandbytes (nf4, fp4), GPTQ (2, 4 or 8 bits) or AWQ (gemm). Everything else
is refused by name.

result: a model directory for finetune, chat, merge and export. In f32, the default, each weight has the exact value
of its codes; f16 and bf16 are half as large, and the numbers that they round are counted. A bitsandbytes nf4
model that is written as f32 and trained with --base nf4 is trained on its own codes.

A GGUF file contains its tokenizer, but not every rule of each kind. Byte-level BPE (Llama 3, SmolLM2, Qwen) is made from
the file. For SentencePiece (Llama 2, TinyLlama, Mistral) give the directory of the original model's tokenizer.

GGUF needs the package gguf: pip install 'port-agent[gguf]'.

examples:
  port-agent decode SmolLM2-135M-Instruct.Q4_K_M.gguf --out SmolLM2-decoded
  port-agent decode tinyllama.Q8_0.gguf --tokenizer TinyLlama-1.1B --out TinyLlama-decoded
"""


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `decode` to `commands`."""
    parser = commands.add_parser(
        "decode",
        help="write a quantized model (GGUF, bitsandbytes, GPTQ, AWQ) as one of floats",
        description="Write a quantized model as a model directory of floats, which finetune trains.",
        epilog=_EPILOG,
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="GGUF file, or directory of a quantized model")
    parser.add_argument(
        "-o", "--out", type=Path, required=True, metavar="DIR", help="directory for the model, which must not exist yet"
    )
    parser.add_argument("--type", choices=_TYPES, default=_TYPES[0], help="type of the weights (default f32: exact)")
    parser.add_argument(
        "--tokenizer",
        type=readable_folder,
        metavar="DIR",
        help="directory of the tokenizer, for a GGUF file without its rules",
    )
    parser.add_argument("--json", action="store_true", help="print a line of JSON at the end")
    parser.set_defaults(run=_decode)


def _decode(arguments: argparse.Namespace) -> int:
    """Write the directory; return the exit code. Raises UsageError and FinetuneError."""
    from port_agent.cli.arguments import UsageError
    from port_agent.finetuning.inputs.model_files import check_not_there

    if arguments.tokenizer is not None and not arguments.model.is_file():
        raise UsageError("--tokenizer is only for a GGUF file; leave it out, because a model directory has a tokenizer")
    check_not_there(arguments.out)  # checked before torch and transformers are loaded, which takes seconds
    from port_agent.system.torch_loading import load_torch_library

    load_torch_library()
    from port_agent.intercept.dispatch import light_dynamo

    light_dynamo.hold_place()  # nothing is compiled here
    from port_agent.cli.progress import StageBar
    from port_agent.finetuning.decoding.directory import DecodedType, decode_model

    with StageBar(("decoding",), quiet=arguments.json) as bar:
        outcome = decode_model(
            arguments.model,
            arguments.out,
            DecodedType(arguments.type),
            arguments.tokenizer,
            lambda share: bar.update("decoding", share),
        )
    if arguments.json:
        print(json.dumps({"event": "finished", **asdict(outcome)}))
        return 0
    rounded = f"{outcome.rounded:,} numbers rounded" if outcome.rounded else "every number exact"
    print(
        f"{outcome.out}: {format_bytes(outcome.nbytes)}, {outcome.decoded} of {outcome.weights} weights decoded, in "
        f"{outcome.type}, {rounded}"
    )
    return 0
