"""`merge`: write an adapter of `finetune` and its base as one model directory."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from port_agent.cli.arguments import readable_folder
from port_planner.base.units import format_bytes

_EPILOG = """\
result: a directory like the base's, with the same files, tensors and data types, and the weights that peft's
merge_and_unload() gives, to the bit. It appears once it is complete. Besides Python, torch and transformers, memory holds some
rows at a time and one layer's adapter product in 32 bits.

An adapter that was trained with --base nf4 or int8 belongs to the quantized weights. It is merged into those, and layers
without adapters have them too; the file is as large as the base's.

for llama.cpp: `port-agent export --gguf` writes Llama and Qwen. For other models, use its converter, a Python script in its
sources, and its program llama-quantize:
  python convert_hf_to_gguf.py MERGED --outfile model.gguf --outtype bf16
  llama-quantize model.gguf model-q4.gguf Q4_K_M
or, without merging, the adapter alone for use with a GGUF file of its base:
  python convert_lora_to_gguf.py ADAPTER --base MODEL --outfile adapter.gguf --outtype f16

examples:
  port-agent merge notes-adapter --out SmolLM2-notes
  port-agent merge notes-adapter --model /mnt/ssd/SmolLM2-135M --out SmolLM2-notes
"""


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `merge` to `commands`."""
    parser = commands.add_parser(
        "merge",
        help="write an adapter of finetune and its base as one model",
        description="Write the base model with an adapter merged into its weights.",
        epilog=_EPILOG,
    )
    parser.add_argument("adapter", type=readable_folder, metavar="ADAPTER", help="directory that finetune wrote")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="directory for the model, which must not exist yet"
    )
    parser.add_argument(
        "--model",
        type=readable_folder,
        metavar="DIR",
        help="directory of the base model (default: where it was during training)",
    )
    parser.add_argument("--json", action="store_true", help="print a line of JSON at the end")
    parser.set_defaults(run=_merge)


def _merge(arguments: argparse.Namespace) -> int:
    """Merge an adapter into its base; return the exit code. Raises FinetuneError."""
    from port_agent.finetuning.inputs.model_files import check_not_there

    check_not_there(arguments.out)  # checked before torch and transformers are loaded, which takes seconds
    from port_agent.system.torch_loading import load_torch_library

    load_torch_library()
    from port_agent.intercept.dispatch import light_dynamo

    light_dynamo.hold_place()  # nothing is compiled here
    from port_agent.cli.progress import StageBar
    from port_agent.finetuning.merge import merge_adapter

    def note(text: str) -> None:
        print(f"port-agent: {text}", file=sys.stderr)

    with StageBar(("merging",), quiet=arguments.json) as bar:
        outcome = merge_adapter(
            arguments.adapter, arguments.out, arguments.model, lambda share: bar.update("merging", share), note
        )
    if arguments.json:
        print(json.dumps({"event": "finished", **asdict(outcome)}))
        return 0
    print(
        f"{outcome.out}: {format_bytes(outcome.nbytes)}, {outcome.merged} layers of {Path(outcome.base).name} with "
        f"their adapters; for llama.cpp: python convert_hf_to_gguf.py {outcome.out}"
    )
    return 0
