"""`finetune`: train a language model from the user's own directory on the user's own text, inside a budget.

This process checks files and options, then becomes the process that trains (`port_agent.cli.finetune`), as `exec` does.
"""

import argparse
import datetime
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from port_agent.cli.arguments import (
    UsageError,
    add_federation_terms,
    federation_terms,
    positive_number,
    readable_folder,
    rounds_led,
    size,
    whole_number,
    writable_folder,
)
from port_agent.cli.exec import add_budget_options, check_page_dir, run_in_budget
from port_agent.cli.finetune.request import AS_STORED, check_finetune_arguments, options_of
from port_agent.control import places
from port_agent.finetuning.inputs.model_files import check_model_files, check_stored_as, has_own_code
from port_agent.finetuning.inputs.options import Compute, FinetuneOptions, MicroBatchOrder
from port_agent.finetuning.inputs.schedule import RateSchedule
from port_agent.finetuning.result import check_result_place
from port_agent.finetuning.text.records import Records
from port_agent.finetuning.text.task import read_config
from port_agent.packing.quantized import Quantization
from port_agent.system.python_process import few_kernels_environment
from port_agent.worker.thread_limit import usable_cores
from port_planner.base.units import format_bytes
from port_planner.ir.device_kinds import CPU

if TYPE_CHECKING:
    from port_agent.finetuning.job_file import FinetuneJob

_EPILOG = """\
data: records with these keys: "text"; "prompt" and "completion"; with --dpo or --orpo "prompt", "chosen" and "rejected";
"messages" (OpenAI's and trl's, with tools, written in the tokenizer's own chat template); "conversations" (ShareGPT);
"instruction", "input" and "output" (Alpaca). Files may be JSON lines, a JSON array, CSV or Parquet (with pyarrow), also
compressed by gzip. Any other file is one text. Of a directory, all files are read. Texts are packed to full sequences. Prompts,
other people's messages and answers of weight 0 add no loss. What is cut, left out or not read is counted and reported before
the first update.

A model with an encoder and a decoder (T5, BART) takes "prompt" and "completion" only. An encoder (BERT, RoBERTa, DistilBERT)
takes "text" and learns masked words, others each time. With a "label" for each text, it learns to choose one; labels.json in DIR
lists them in the order of its logits.

result: an adapter directory with its tokenizer, which peft's PeftModel.from_pretrained loads; with --full, a model
directory. For llama.cpp: `port-agent export --gguf`, or its own convert_lora_to_gguf.py and convert_hf_to_gguf.py.

--base stores the quantized weights in MODEL/.port-agent once. The adapter belongs to that quantized model; on the original
model it works as well as any adapter of QLoRA.

Ctrl-C ends after the current update. The same command continues from there, with the same bits as without the pause.

examples:
  port-agent finetune SmolLM2-135M --data notes.txt --ram 500M --out notes-adapter
  port-agent finetune TinyLlama-1.1B --data chats.jsonl --ram 600M --epochs 3 --sample "How do I" --out chats-adapter
  port-agent finetune Qwen2.5-3B --data notes.txt --ram 900M --base nf4 --out notes-adapter
  port-agent finetune distilbert-base-uncased --data reviews.jsonl --ram 600M --out stars
  port-agent finetune Qwen2.5-3B --data notes.txt --ram 8G --device cuda --gpu-ram 4G --out notes-adapter
  port-agent finetune gpt2 --data poems.txt --ram 1G --full --out gpt2-poems --opportunistic
  port-agent finetune gpt2 --data poems.txt --ram 700M --out gpt2-poems --submit
  port-agent finetune gpt2 --data poems.txt --ram 700M --out gpt2-poems --explain
  port-agent finetune gpt2 --data mine.txt --ram 700M --out ours --submit --federated --name ours
  port-agent finetune --settings chats.toml --ram 700M

--submit gives the job to the agent of this machine and returns. The agent runs it when its policy allows it (charging, idle, in
its time window), ends it to release its memory, and continues from its checkpoint, also after a restart.
`port-agent status` and `port-agent job show`, `logs`, `pause`, `resume` and `cancel` know it. It runs with your rights if the
agent runs as root, otherwise with the agent's. Model and data are used where they are; if they change, the job is refused.

--federated, with --submit on each of several paired devices under one --name: adapters are averaged round by round, and the
data stays where it is. Each device needs the same model directory. `port-agent peer federate start NAME --rounds N` on one
of them leads. --epochs or --updates are those of one round. After the last round, each device has the average in --out.

--opportunistic runs it here whenever the agent allows it; it ends with the terminal.
"""

_NOT_SUBMITTED = ("report", "read_limit", "write_limit", "step_deadline", "writes_per_step", "config", "opportunistic")
"""Arguments of a run in a terminal that a submitted job does not have."""

_PAIR_BETA = 0.1
"""Default beta of DPO and ORPO, as in trl."""

_MIN_HEAD_ROWS = 16
"""Smallest number of rows at a time; with fewer, reading the head's weight takes longer than multiplying by it."""

_MIN_TOKENS = 8
_MAX_TOKENS = 1 << 20
_MAX_RANK = 1024
_MAX_SHOWN = 1000


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `finetune` to `commands`."""
    parser = commands.add_parser(
        "finetune",
        help="fine-tune a language model on your own text, inside a memory budget",
        description="Fine-tune a transformers language model from its directory, on your own text.",
        epilog=_EPILOG,
    )
    parser.add_argument("model", type=Path, help="directory with config.json, safetensors and tokenizer")
    parser.add_argument(
        "--data", type=Path, required=True, action="append", metavar="FILE",
        help="file of text, JSON, CSV or Parquet, recognised by its content, or a directory of them; may be repeated",
    )  # fmt: skip
    parser.add_argument("--out", type=writable_folder, required=True, metavar="DIR", help="directory for the result")
    parser.add_argument(
        "--ram", type=size, required=True, metavar="SIZE", help="memory of the whole process, e.g. 600M"
    )
    _add_device(parser.add_argument_group("the device"))
    _add_what_is_trained(parser.add_argument_group("what is trained"))
    _add_updates(parser.add_argument_group("updates"))
    _add_rate(parser.add_argument_group("the optimizer, AdamW"))
    data = parser.add_argument_group("the data")
    _add_data(data)
    _add_how_it_is_learned(data)
    _add_job(parser.add_argument_group("the job"))
    add_budget_options(parser)
    parser.set_defaults(run=_finetune, tensors=None)


def _add_device(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--device",
        metavar="KIND",
        default=CPU,
        help="cpu or cuda: device that trains (default cpu). The result's bits are those of that kind of device; every operator "
        "has to repeat to the bit there",
    )
    group.add_argument(
        "--gpu-ram",
        type=size,
        metavar="SIZE",
        help="with --device: memory that the process may take on the GPU, e.g. 6G, context and libraries included. What does "
        "not fit moves to the host's memory, within --ram, and from there to the disk (default: no limit)",
    )


def _add_what_is_trained(group: "argparse._ArgumentGroup") -> None:
    what = group.add_mutually_exclusive_group()
    what.add_argument("--lora", type=_rank, metavar="RANK", help="rank of the adapters, 16 or r=16 (default 8)")
    what.add_argument(
        "--from",
        type=readable_folder,
        dest="begin_from",
        metavar="ADAPTER",
        help="continue to train the adapter of an earlier fine-tuning of this model, with its rank, alpha and layers",
    )
    what.add_argument("--full", action="store_true", help="train all weights, in 32 bits, instead of adapters")
    group.add_argument(
        "--base",
        choices=(AS_STORED, *(grid.value for grid in Quantization)),
        metavar="FORMAT",
        help="quantize the frozen weights first: nf4 (4.5 bits per weight) or int8 (8.25). Each step then reads less, and you "
        f"train the quantized model (default: as they are stored; {AS_STORED} demands that they are bfloat16)",
    )
    group.add_argument(
        "--targets",
        metavar="LAYERS",
        default="",
        help="layers that get adapters, as the ends of their names with commas between, or all-linear for all but the head (default: "
        "peft's choice for this kind of model)",
    )
    group.add_argument(
        "--alpha",
        type=positive_number,
        metavar="ALPHA",
        help="scale the adapters by ALPHA, divided by their rank (default: twice the rank)",
    )
    group.add_argument("--rslora", action="store_true", help="divide --alpha by the square root of the rank instead")
    group.add_argument("--dora", action="store_true", help="also train the magnitude of each row of a weight (DoRA)")
    group.add_argument(
        "--dropout",
        type=_share,
        default=0.0,
        metavar="SHARE",
        help="dropout: share of an adapter's inputs set to zero at random (default 0)",
    )


def _add_updates(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--seq-len",
        type=whole_number(_MIN_TOKENS, _MAX_TOKENS),
        metavar="N",
        help="most tokens of a sequence (default: texts are packed to 256; an answer and what is before it keep their "
        "length, up to what a quarter of --ram takes and 2,048; with --dpo and --orpo 256. The log reports how many are "
        "cut, and the length that cuts none)",
    )
    group.add_argument("--batch", type=whole_number(1), default=1, metavar="N", help="sequences per batch (default 1)")
    group.add_argument(
        "--accumulate", type=whole_number(1), default=1, metavar="N", help="batches per update (default 1)"
    )
    group.add_argument(
        "--accumulate-by",
        type=MicroBatchOrder,
        choices=tuple(MicroBatchOrder),
        metavar="ORDER",
        help="run the batches of an update one after another (batches), or together, layer by layer (layers). Layers "
        "reads weights once per update and computes each layer once more, with the same bits (default: layers if "
        "weights do not fit into --ram and --accumulate is more than 1, or if adapters would write to a disk "
        "that wears out). With one batch, layers keeps only the input of each layer: if the tensors of one "
        "layer fit, adapters then train without writing to the disk",
    )
    group.add_argument(
        "--autocast",
        action="store_true",
        help="run the forward pass under torch's bfloat16 autocast; weights keep their type",
    )
    group.add_argument(
        "--compute",
        type=Compute,
        choices=tuple(Compute),
        help="type to compute in with frozen 16-bit weights: as they are stored, or float32, with the bits of a "
        "model loaded in float32, while the weights stay in 16 bits (default: float32 if a product of the "
        "model's shape takes three times as long in 16 bits on this device)",
    )
    group.add_argument(
        "--head-rows",
        type=whole_number(_MIN_HEAD_ROWS),
        metavar="N",
        help="run the head on N rows at a time, even if bits change (default: all, or fewer if all do not fit the budget and "
        "a comparison on this device gives the same bits)",
    )
    length = group.add_mutually_exclusive_group()
    length.add_argument(
        "--epochs", type=whole_number(1), default=1, metavar="N", help="passes over the data (default 1)"
    )
    length.add_argument("--updates", type=whole_number(1), metavar="N", help="number of updates, instead of epochs")


def _add_rate(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--lr", type=positive_number, metavar="RATE", help="learning rate (default 2e-4, with --full 2e-5)"
    )
    group.add_argument(
        "--warm-up",
        type=_share,
        default=0.03,
        metavar="SHARE",
        help="share of the updates in which the rate rises linearly to --lr (default 0.03)",
    )
    group.add_argument(
        "--schedule",
        type=RateSchedule,
        choices=tuple(RateSchedule),
        default=RateSchedule.LINEAR,
        metavar="KIND",
        help="learning rate after the warm-up: linear (to 0, the default), cosine (to 0) or constant",
    )
    group.add_argument(
        "--weight-decay",
        type=_share,
        default=0.0,
        metavar="NUMBER",
        help="weight decay of AdamW; gradients are clipped to a norm of 1 (default 0)",
    )


def _add_data(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--show-data",
        type=whole_number(1, _MAX_SHOWN),
        metavar="N",
        help="show N training sequences, with the learned part in colour, and train nothing (each run shows one first)",
    )
    held_out = group.add_mutually_exclusive_group()
    held_out.add_argument(
        "--valid",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="measure perplexity on this file instead of on a share of --data",
    )
    held_out.add_argument(
        "--held-out",
        type=_share,
        default=0.05,
        metavar="SHARE",
        help="share of the sequences held out to measure perplexity before and after (default 0.05; 0: none)",
    )
    group.add_argument(
        "--eval-every",
        type=whole_number(1),
        metavar="N",
        help="measure the held-out loss every N updates; the result has the best weights, and curve.csv in DIR lists "
        "all losses",
    )
    group.add_argument(
        "--patience",
        type=whole_number(1),
        metavar="N",
        help="with --eval-every: stop after N measurements without improvement",
    )
    group.add_argument(
        "--tensorboard",
        type=Path,
        metavar="DIR",
        help="write training and held-out losses to a TensorBoard file in this directory as they arise",
    )
    group.add_argument(
        "--date",
        type=_date,
        metavar="YYYY-MM-DD",
        help="date that chat templates insert (default: today; a resumed run keeps its date)",
    )
    group.add_argument(
        "--seed",
        type=whole_number(0),
        default=0,
        metavar="N",
        help="seed of the data's order and of new adapters (default 0)",
    )


def _add_how_it_is_learned(group: "argparse._ArgumentGroup") -> None:
    pairs = group.add_mutually_exclusive_group()
    pairs.add_argument(
        "--dpo",
        type=positive_number,
        nargs="?",
        const=_PAIR_BETA,
        metavar="BETA",
        help="learn which of two answers is preferred (DPO), relative to the model without its adapters, from "
        f"records with prompt, chosen and rejected (default of BETA: {_PAIR_BETA})",
    )
    pairs.add_argument(
        "--orpo",
        type=positive_number,
        nargs="?",
        const=_PAIR_BETA,
        metavar="BETA",
        help="learn the chosen answer with its prompt, and its odds over the rejected one by weight BETA (ORPO), from "
        f"the same records; adapters or --full (default of BETA: {_PAIR_BETA})",
    )
    group.add_argument(
        "--borders",
        action="store_true",
        help="mask texts that share a packed sequence from each other (default: each sees those before it; prompts, "
        "answers and conversations always stand alone)",
    )


def _add_job(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--float32",
        action="store_true",
        help="with --full: write the result in float32 (default: the type of the model's files)",
    )
    group.add_argument(
        "--overwrite", action="store_true", help="replace the contents of --out once the new result is complete"
    )
    group.add_argument(
        "--sample",
        metavar="PROMPT",
        help="show how the model continues this text, before and after training; asked as a question if the data has "
        "conversations",
    )
    group.add_argument(
        "--settings",
        metavar="FILE",
        help="take options from a TOML file, by their names here (lr = 1e-4, data = [...], rslora = true; model for "
        "the directory); options that are typed override it",
    )
    group.add_argument("--json", action="store_true", help="print a line of JSON for each update and at the end")
    group.add_argument(
        "--explain", action="store_true", help="show what would be done and why, in figures, and train nothing"
    )
    group.add_argument(
        "--submit", action="store_true", help="submit it to the agent of this machine as a job, and return"
    )
    group.add_argument("--name", help="with --submit: name of the job (default: from model and data)")
    group.add_argument(
        "--federated",
        action="store_true",
        help="with --submit: train a round of the adapters when a paired device that leads a federation of this name asks",
    )
    group.add_argument(
        "--proximal-mu",
        type=positive_number,
        metavar="NUMBER",
        help="with --federated: FedProx; X / 2 times the squared distance from the round's first adapters is added to the "
        "loss (the federation is led with --strategy fedprox --proximal-mu X)",
    )
    add_federation_terms(group)


def _rank(text: str) -> int:
    return whole_number(1, _MAX_RANK)(text.removeprefix("r="))


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a valid share; give a number from 0 to below 1, such as 0.05")
    return share


def _date(text: str) -> str:
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is not a valid date; give one such as 2026-03-09") from error


def _finetune(arguments: argparse.Namespace) -> int:
    """Become the process that trains, or submit the job.

    Raises UsageError and FinetuneError before anything is loaded.
    """
    check_finetune_arguments(arguments)
    check_model_files(arguments.model)
    if arguments.base == AS_STORED:
        check_stored_as(arguments.model, AS_STORED.upper())
    if has_own_code(arguments.model):
        read_config(arguments.model)  # loads transformers, which does not recognise the kind of model otherwise
    Records(*arguments.data)  # rejects data with nothing to train on
    options = options_of(arguments)
    if not (arguments.explain or arguments.show_data):
        check_result_place(options)
    if not arguments.submit:
        only = (
            ["--explain", str(arguments.ram)] if arguments.explain else ["--show-data"] if arguments.show_data else []
        )
        os.environ |= few_kernels_environment()
        program = ["port_agent.cli.finetune", msgspec.json.encode(options).decode(), *only]
        run_in_budget(arguments, program, module=True, ours=True, name=f"finetune {arguments.model.name}")
    return _submit(arguments, options)


def _submit(arguments: argparse.Namespace, options: FinetuneOptions) -> int:
    """Submit the job to the agent. Raises UsageError, and the agent's ControlError."""
    from port_agent.finetuning.job_file import FinetuneJob
    from port_agent.jobs.job import JobKind, name_like

    given = next((name for name in _NOT_SUBMITTED if getattr(arguments, name)), None)
    if given is not None:
        raise UsageError(
            f"--{given.replace('_', '-')} is for a run in the foreground; leave it out, or leave out --submit"
        )
    check_page_dir(arguments.page_dir, for_ram=True)
    threads = arguments.cpus or usable_cores()
    job = FinetuneJob.of(options, ram_bytes=arguments.ram, threads=threads, page_dir=arguments.page_dir)
    client = places.connect(arguments.runtime_dir)
    name = arguments.name or name_like(f"{arguments.model.absolute().name}-{arguments.data[0].stem}")
    fields = {
        "kind": JobKind.FINETUNE.value,
        "name": name,
        "federated": arguments.federated,
        "terms": federation_terms(arguments),
    }
    with tempfile.NamedTemporaryFile() as file:
        file.writelines(_job_file(job, federated=arguments.federated))
        file.flush()
        answer = client.submit(Path(file.name), **fields)
    if arguments.json:
        print(json.dumps(answer, indent=2))
        return 0
    waits, see = "is queued", f"port-agent status, port-agent job logs {answer['id']}"
    if arguments.federated:
        waits, see = "waits for rounds", f"port-agent peer federate status. {rounds_led(arguments, answer)}"
    print(
        f"Job {answer['id']} ({answer['name']}) {waits}, within {format_bytes(arguments.ram)} on {threads} threads; the result "
        f"goes to {options.out}. See it with: {see}"
    )
    return 0


def _job_file(job: "FinetuneJob", *, federated: bool) -> Iterable[bytes]:
    """Return the content of a job file. Raises FinetuneError and OSError."""
    if not federated:
        return (job.encoded(),)
    from port_agent.finetuning.federated import (
        federated_job,  # loads torch, for the adapter that a federation begins with
    )

    return federated_job(job)
