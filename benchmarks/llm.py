"""Fine-tuning language models with adapters inside a budget: `python -m benchmarks.llm [CASE ...] [--budgets MIB ...]`.

Models of real shapes with random bfloat16 weights and a tokenizer trained on the shipped text, LoRA of rank 8 on
sequences of 256 tokens, one at a time: `finetune`'s recipe in plain PyTorch, with gradient checkpointing of
transformers, and through `port-agent finetune` within each budget, over the weights as they are and over those on a
grid; published figures next to them. `--full` trains all weights in 32 bits instead (plain AdamW of the 0.5B takes 8
GiB), `--accumulate 8` makes updates of eight sequences, one by one and layer by layer. Seconds are medians of the
updates after the first, bytes are per update (weights read from their files alongside what is paged), peaks of the
whole process. Losses are compared to the bit with plain PyTorch's over the same weights, in their type, which
`finetune` is told to compute in too.
"""

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from port_agent.finetuning.inputs.options import FinetuneOptions, MicroBatchOrder
from port_agent.packing.quantized import Quantization

TOKENS = 256
RANK = 8
UPDATES = 4
TIMEOUT_S = 1800
TEXT = Path(__file__).parents[1] / "examples" / "shakespeare" / "tinyshakespeare.txt"
VOCABULARY = 4096
PLAIN_WEIGHTS = "bf16"

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "tinyllama-1.1b": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
        "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000, "tie_word_embeddings": False,
    },
    "qwen2.5-3b": {
        "model_type": "qwen2", "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""The shapes in their `config.json`."""

PUBLISHED = {
    "qwen2.5-0.5b": (
        "MeBP, iPhone, 4-bit base, 1 x 256 (arXiv 2510.03425): 361 MB; MeSP (no Python): 136 MB; MobileFineTuner: "
        "2,887 MB"
    ),
    "qwen2.5-3b": "MeBP, iPhone, 4-bit base, 1 x 256 (arXiv 2510.03425): 638 MB; MeSP (no Python): 368 MB",
}
"""Published figures, with the definitions of their sources: here it is the whole process."""


@dataclass(frozen=True)
class Row:
    """One way to train one model. Bytes are per update, or None if it did not finish."""

    model: str
    way: str
    budget_mib: int | None
    peak_mib: int | None = None
    seconds: float | None = None
    first_seconds: float | None = None
    read_mib: float | None = None
    written_mib: float | None = None
    mapped_mib: float | None = None
    losses: list[float] | None = None
    equal: bool | None = None


def main() -> int:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["qwen2.5-0.5b", "tinyllama-1.1b"], help=", ".join(SHAPES))
    parser.add_argument("--budgets", nargs="*", type=int, default=[450, 600], help="MiB of the whole process")
    parser.add_argument(
        "--weights",
        nargs="+",
        default=[PLAIN_WEIGHTS, Quantization.NF4],
        choices=[PLAIN_WEIGHTS, *Quantization],
        help="of the base: as they are, or on a grid",
    )
    parser.add_argument("--no-plain", action="store_true", help="for a model that plain PyTorch has no room for")
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="a disk for weights and pages")
    parser.add_argument("--full", action="store_true", help="all weights, in 32 bits, instead of adapters")
    parser.add_argument("--accumulate", type=int, default=1, metavar="N", help="sequences per update, one at a time")
    parser.add_argument("--updates", type=int, default=UPDATES, help="2 or more")
    parser.add_argument("--head-rows", type=int, help="run the head on so many rows at a time, in every way")
    parser.add_argument("--read-limit", help="read pages no faster, e.g. 45M")
    parser.add_argument("--write-limit", help="write pages no faster, e.g. 25M")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if unknown := set(arguments.cases) - SHAPES.keys():
        parser.error(f"no shape {', '.join(unknown)}; there are {', '.join(SHAPES)}")
    rows: list[Row] = []
    for case in arguments.cases:
        with tempfile.TemporaryDirectory(prefix="port-llm-", dir=arguments.folder) as folder:
            make_model(Path(folder), SHAPES[case])
            rows += measure(case, Path(folder), arguments)
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        _print(rows, arguments)
    return 0 if all(row.losses and row.equal is not False for row in rows) else 1


def measure(case: str, folder: Path, arguments: argparse.Namespace) -> list[Row]:
    """Return the rows of one model."""
    asked = FinetuneOptions(
        str(folder / "model"),
        (str(TEXT),),
        str(folder / "out"),
        sequence_tokens=TOKENS,
        updates=arguments.updates,
        lora_rank=None if arguments.full else RANK,
        accumulate=arguments.accumulate,
        head_rows=arguments.head_rows,
        held_out=0.0,
        overwrite=True,
        json=True,
    )
    rows: list[Row] = []
    for name in [PLAIN_WEIGHTS] if arguments.full else arguments.weights:
        base = None if name == PLAIN_WEIGHTS else Quantization(name)
        options = dataclasses.replace(asked, base=base)
        weights = "full, fp32" if arguments.full else name
        alike: list[Row] = []
        if not arguments.no_plain:
            alike.append(_plain(Row(case, f"{weights}, plain", None), options))
            if base is None:
                alike.append(_plain(Row(case, f"{weights}, checkpointing", None), options, "checkpointing"))
        orders = [None] if options.accumulate == 1 else [*MicroBatchOrder]
        for mib, order in itertools.product(arguments.budgets, orders):
            way = f"{weights}, finetune" if order is None else f"{weights}, by {order}"
            ordered = dataclasses.replace(options, accumulate_by=order)
            alike.append(_within(Row(case, way, mib), ordered, folder, arguments))
        trained = [row.losses for row in alike if row.losses]
        rows += [
            dataclasses.replace(row, equal=row.losses == trained[0] if row.losses and len(trained) > 1 else None)
            for row in alike
        ]
    return rows


def _plain(row: Row, options: FinetuneOptions, *words: str) -> Row:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benchmarks.llm_plain",
        msgspec.json.encode(options).decode(),
        *words,
    ]
    events = _events(command, row)
    return row if events is None else _filled(row, events[:-1], events[-1])


def _within(row: Row, options: FinetuneOptions, folder: Path, arguments: argparse.Namespace) -> Row:
    shutil.rmtree(
        f"{options.out}.state", ignore_errors=True
    )  # of a row that passed its budget: it would continue from there
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [
            sys.executable, "-W", "ignore", "-m", "port_agent.cli", "finetune", options.model, "--data", options.data[0], "--out",
            options.out, "--ram", f"{row.budget_mib}M", "--seq-len", str(TOKENS), "--updates", str(options.updates), "--held-out", "0",
            "--accumulate", str(options.accumulate), *([] if options.accumulate_by is None else ["--accumulate-by", options.accumulate_by]),
            "--compute", "stored", "--overwrite", "--json", "--page-dir", str(folder), "--report", report.name,
            *(["--full"] if options.lora_rank is None else []),
        ]  # fmt: skip
        for name in ("read_limit", "write_limit"):
            if (speed := getattr(arguments, name)) is not None:
                command += [f"--{name.replace('_', '-')}", speed]
        if options.head_rows is not None:
            command += ["--head-rows", str(options.head_rows)]
        if options.base is not None:
            command += ["--base", options.base.value]
        events = _events(command, row)
        if events is None:
            return row
        return _filled(row, events[:-1], json.loads(Path(report.name).read_text()))


def _events(command: list[str], row: Row) -> list[dict[str, Any]] | None:
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    if done.returncode != 0:
        print(f"{row.model}, {row.way}, {row.budget_mib}: {' '.join(done.stderr.split())}", file=sys.stderr)
        return None
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _filled(row: Row, updates: list[dict[str, Any]], told: dict[str, Any]) -> Row:
    seconds = [update["seconds"] for update in updates]
    moved = {
        f"{what}_mib": told[f"{what}_bytes"] / len(updates) / 2**20
        for what in ("read", "written", "mapped")
        if f"{what}_bytes" in told
    }
    return dataclasses.replace(
        row,
        peak_mib=told["peak_resident_bytes"] >> 20,
        seconds=statistics.median(seconds[1:]),
        first_seconds=seconds[0],
        losses=[update["loss"] for update in updates],
        **moved,
    )


def make_model(folder: Path, shape: dict[str, Any]) -> None:
    """Write a model of random weights to `folder`/model, in a separate process: a child's peak
    begins with that of its parent.
    """
    making = multiprocessing.get_context("spawn").Process(target=_write_model, args=(folder / "model", shape))
    making.start()
    making.join()
    if making.exitcode != 0:
        raise SystemExit("the model could not be written; see above")


def _write_model(folder: Path, shape: dict[str, Any]) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.train([str(TEXT)], trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<s>", "</s>"]))
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    torch.manual_seed(0)
    config = AutoConfig.for_model(**shape)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def _print(rows: list[Row], arguments: argparse.Namespace) -> None:
    console = Console(width=None if sys.stdout.isatty() else 130)
    plain: dict[str, Row] = {}
    """The first row of each model, which is not plain with `--no-plain`."""
    what = "all weights, AdamW" if arguments.full else f"LoRA r={RANK}"
    title = (
        f"{what}, {arguments.accumulate} x {TOKENS} tokens an update: peak of the whole process, seconds of an update"
    )
    table = Table(title=title)
    columns = (
        "model", "weights, way", "budget MiB", "peak MiB", "s/update", "of plain", "first s", "read MiB", "written MiB",
        "of files", "losses equal",
    )  # fmt: skip
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < 2 else "right")
    for row in rows:
        plain.setdefault(row.model, row)
        reference = None if arguments.no_plain else plain[row.model].seconds
        table.add_row(
            row.model,
            row.way,
            _shown(row.budget_mib, "d"),
            _shown(row.peak_mib, "d"),
            _shown(row.seconds, ".2f"),
            _shown(row.seconds and reference and row.seconds / reference, ".2f"),
            _shown(row.first_seconds, ".2f"),
            _shown(row.read_mib, ".0f"),
            _shown(row.written_mib, ".0f"),
            _shown(row.mapped_mib, ".0f"),
            "not compared" if row.equal is None else "yes" if row.equal else "NO",
        )
    console.print(table)
    for model in plain:
        if model in PUBLISHED:
            console.print(f"published, {model}: {PUBLISHED[model]}")


def _shown(number: float | None, form: str) -> str:
    return "" if number is None else format(number, form)


if __name__ == "__main__":
    sys.exit(main())
