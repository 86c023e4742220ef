"""Families of language models with `finetune` inside a budget, and with plain PyTorch:
`python -m benchmarks.families [FAMILY ...]`.

A model of each family with random bfloat16 weights (6 layers of 384) trains adapters of rank 8 in three updates of 128
tokens, from the same data: in plain PyTorch, and by `port-agent finetune` within `--budget`. Equal are the losses to
the bit and the files of adapters to the byte. Peaks are those of the whole process; bytes those of all updates. A
family that passes its budget, or is refused, fails the command. `--write` writes benchmarks/results/families.md.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from port_agent.finetuning.inputs.options import Compute, FinetuneOptions

UPDATES, TOKENS, RANK = 3, 128, 8
RESULTS = Path(__file__).with_name("results") / "families.md"
TIMEOUT_S = 900
TEXT = Path(__file__).parents[1] / "examples" / "shakespeare" / "tinyshakespeare.txt"
_TEXT_CHARACTERS = 3000
_VOCABULARY, _WIDTH, _LAYERS, _HEADS = 8000, 384, 6, 6
_MARKS = ["<pad>", "<s>", "</s>", "<mask>"]
_MARKED = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

_DECODER = {
    "hidden_size": _WIDTH, "intermediate_size": 1024, "num_hidden_layers": _LAYERS, "num_attention_heads": _HEADS,
    "num_key_value_heads": 2, "max_position_embeddings": 512, **_MARKED,
}  # fmt: skip
_EXPERTS = {
    **_DECODER, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": _WIDTH,
    "shared_expert_intermediate_size": _WIDTH,
}  # fmt: skip
_OF_GPT = {"n_embd": _WIDTH, "n_layer": _LAYERS, "n_head": _HEADS, "n_positions": 512, **_MARKED}
_BLOCKS = dict.fromkeys(("encoder_layers", "decoder_layers"), 4) | dict.fromkeys(
    ("encoder_attention_heads", "decoder_attention_heads"), _HEADS
)


def _alike(kinds: tuple[str, ...], settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return dict.fromkeys(kinds, settings)


FAMILIES: dict[str, dict[str, Any]] = {
    **_alike(("llama", "qwen2", "smollm3", "gpt_neox", "falcon", "olmo", "olmo2", "stablelm", "granite", "cohere", "starcoder2", "nemotron"), _DECODER),
    **_alike(("qwen3", "gemma", "glm4", "helium"), {**_DECODER, "head_dim": 64}),
    **_alike(("gemma2", "gemma3_text"), {**_DECODER, "head_dim": 64, "sliding_window": 32, "query_pre_attn_scalar": 64}),
    **_alike(("mistral", "olmo3", "cohere2", "exaone4"), {**_DECODER, "sliding_window": 32}),
    "phi": {**_DECODER, "num_key_value_heads": _HEADS},
    "phi3": {**_DECODER, "original_max_position_embeddings": 512},
    "lfm2": {**_DECODER, "layer_types": ["conv", "full_attention"] * 3},
    "gpt2": _OF_GPT,
    "gptj": {**_OF_GPT, "rotary_dim": 8},
    "codegen": {**_OF_GPT, "rotary_dim": 8, "n_head": 4},
    "bloom": {"hidden_size": _WIDTH, "n_layer": _LAYERS, "n_head": _HEADS, **_MARKED},
    "mpt": {"d_model": _WIDTH, "n_layers": _LAYERS, "n_heads": _HEADS, "expansion_ratio": 2, "max_seq_len": 512},
    "opt": {**_DECODER, "ffn_dim": 1024, "word_embed_proj_dim": 64},
    "mamba": {"hidden_size": _WIDTH, "num_hidden_layers": _LAYERS, "state_size": 8},
    **_alike(("mixtral", "qwen2_moe", "olmoe", "granitemoe", "phimoe"), _EXPERTS),
    "qwen3_moe": {**_EXPERTS, "head_dim": 64},
    "gpt_oss": {**_EXPERTS, "head_dim": 64, "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"] * 3},
    "deepseek_v3": {
        **_EXPERTS, "num_key_value_heads": _HEADS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16,
        "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 64, "first_k_dense_replace": 1,
    },
    "t5": {"d_model": _WIDTH, "d_kv": 64, "d_ff": 1024, "num_layers": 4, "num_heads": _HEADS, "decoder_start_token_id": 0, **_MARKED},
    "bart": {
        "d_model": _WIDTH, **_BLOCKS, "encoder_ffn_dim": 1024, "decoder_ffn_dim": 1024, "max_position_embeddings": 512,
        "decoder_start_token_id": 2, **_MARKED,
    },
    **_alike(("bert", "electra", "albert"), {**_DECODER, "embedding_size": _WIDTH}),
    "roberta": {**_DECODER, "max_position_embeddings": 514, "pad_token_id": 1},
    "distilbert": {"dim": _WIDTH, "hidden_dim": 1024, "n_layers": _LAYERS, "n_heads": _HEADS, "pad_token_id": 0},
    "modernbert": {**_DECODER, "local_attention": 32},
    "deberta-v2": {**_DECODER, "pos_att_type": ["p2c", "c2p"], "relative_attention": True},
}  # fmt: skip
"""Settings of the configuration of each kind of model; the rest is transformers' default."""

_ENCODERS = ("bert", "electra", "albert", "roberta", "distilbert", "modernbert", "deberta-v2")
_WITH_BOTH = ("t5", "bart")


@dataclass(frozen=True)
class Row:
    """A family's two runs.

    `equal`: whether losses and adapters are equal; `why`: the last line of a run that failed.
    """

    family: str
    plain_mib: int | None = None
    peak_mib: int | None = None
    moved_mib: float | None = None
    seconds: float | None = None
    plain_seconds: float | None = None
    equal: bool = False
    why: str = ""


def main() -> int:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(FAMILIES), help="kinds of models (default: all)")
    parser.add_argument("--budget", type=int, default=360, metavar="MIB", help="of the whole process (default 360)")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/families.md")
    arguments = parser.parse_args()
    if unknown := set(arguments.families) - FAMILIES.keys():
        parser.error(f"no family {', '.join(sorted(unknown))}; there are {', '.join(FAMILIES)}")
    rows = []
    for family in arguments.families:
        with tempfile.TemporaryDirectory(prefix="port-families-", dir="/var/tmp") as folder:
            rows.append(_measured(family, Path(folder), arguments.budget))
        print(_line(rows[-1], arguments.budget), flush=True)
    if arguments.write:
        RESULTS.write_text("\n".join(_page(rows, arguments.budget)) + "\n")
    return 0 if all(_keeps(row, arguments.budget) for row in rows) else 1


def _measured(family: str, folder: Path, budget_mib: int) -> Row:
    """Run a family in both ways."""
    try:
        _make_model(folder / "model", family)
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # another version of transformers
        return Row(family, why=f"transformers makes no such model: {error}")
    data = folder / ("data.jsonl" if family in _WITH_BOTH else "data.txt")
    text = TEXT.read_text()[:_TEXT_CHARACTERS]
    halves = [paragraph.partition("\n") for paragraph in text.split("\n\n") if "\n" in paragraph]
    answers = [json.dumps({"prompt": asked, "completion": said}) for asked, _, said in halves]
    data.write_text("\n".join(answers) if family in _WITH_BOTH else text)
    options = FinetuneOptions(
        str(folder / "model"), (str(data),), str(folder / "plain"), sequence_tokens=TOKENS, updates=UPDATES, lora_rank=RANK,
        held_out=0.0, compute=Compute.STORED, json=True,
    )  # fmt: skip
    plain = _run(["benchmarks.llm_plain", msgspec.json.encode(options).decode()])
    if isinstance(plain, str):
        return Row(family, why=f"plain: {plain}")
    *updates, told = plain
    row = Row(family, plain_mib=told["peak_resident_bytes"] >> 20, plain_seconds=_median(updates))
    budgeted = _run([
        "port_agent.cli", "finetune", options.model, "--data", str(data), "--out", str(folder / "ours"), "--ram", f"{budget_mib}M",
        "--seq-len", str(TOKENS), "--updates", str(UPDATES), "--lora", str(RANK), "--held-out", "0", "--compute", "stored", "--json",
        "--page-dir", str(folder), "--report", str(folder / "report.json"),
    ])  # fmt: skip
    if isinstance(budgeted, str):
        return dataclasses.replace(row, why=budgeted)
    report = json.loads((folder / "report.json").read_text())
    ours = [event for event in budgeted if "loss" in event]
    files = [(folder / name / "adapter_model.safetensors").read_bytes() for name in ("plain", "ours")]
    same = [event["loss"] for event in updates] == [event["loss"] for event in ours]
    return dataclasses.replace(
        row,
        peak_mib=-(-report["peak_resident_bytes"] // 2**20),
        moved_mib=sum(report[f"{what}_bytes"] for what in ("read", "written", "mapped")) / 2**20,
        seconds=_median(ours),
        equal=same and files[0] == files[1],
        why="" if same and files[0] == files[1] else "adapters differ" if same else "losses differ",
    )


def _median(updates: list[dict[str, Any]]) -> float:
    return sorted(float(update["seconds"]) for update in updates)[len(updates) // 2]


def _run(words: list[str]) -> list[dict[str, Any]] | str:
    """Return the lines of JSON that a module prints, or its last line of error."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", "-m", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode != 0:
        return next(iter(done.stderr.strip().splitlines()[-1:]), f"exit code {done.returncode}")
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [event for event in found if {"seconds", "peak_resident_bytes"} & event.keys()]


def _make_model(folder: Path, family: str) -> None:
    """Write a family's model with random weights, and a tokenizer trained on the shipped text."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.train([str(TEXT)], trainers.BpeTrainer(vocab_size=2000, special_tokens=_MARKS))
    marked = {"t5": "$A </s>", "bart": "<s> $A </s>"}.get(family, "<s> $A </s>" if family in _ENCODERS else "<s> $A")
    words.post_processor = processors.TemplateProcessing(single=marked, special_tokens=[("<s>", 1), ("</s>", 2)])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="<pad>", mask_token="<mask>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, vocab_size=_VOCABULARY, **FAMILIES[family])
    made: Any = transformers.AutoModelForCausalLM
    if family in _ENCODERS:
        made = transformers.AutoModelForMaskedLM
    elif family in _WITH_BOTH:
        made = transformers.AutoModelForSeq2SeqLM
    made.from_config(config).to(torch.bfloat16).save_pretrained(folder)


def _keeps(row: Row, budget_mib: int) -> bool:
    return row.equal and row.peak_mib is not None and row.peak_mib <= budget_mib


def _line(row: Row, budget_mib: int) -> str:
    verdict = "equal" if row.equal else row.why
    if row.equal and not _keeps(row, budget_mib):
        verdict = "PASSED ITS BUDGET"
    figures = (row.plain_mib, row.peak_mib, row.moved_mib, row.plain_seconds, row.seconds)
    shown = (
        "" if figure is None else f"{figure:.2f}" if place > 2 else f"{figure:.0f}"
        for place, figure in enumerate(figures)
    )
    return f"| {' | '.join((row.family, verdict, *shown))} |"


def _page(rows: list[Row], budget_mib: int) -> Iterator[str]:
    """Yield the lines of the results' file."""
    yield "# Families of language models with `finetune`"
    yield ""
    yield (
        f"Written by `python -m benchmarks.families --budget {budget_mib} --write`; torch {torch.__version__}, "
        f"transformers {transformers.__version__}; one thread. Three updates of adapters on tiny random models."
    )
    yield ""
    kept = sum(_keeps(row, budget_mib) for row in rows)
    yield f"{kept} of {len(rows)} families have plain PyTorch's losses and adapters to the bit within {budget_mib} MiB."
    yield ""
    yield "| family | verdict | plain peak MiB | peak MiB | moved MiB | plain s/update | s/update |"
    yield "|---|---|---|---|---|---|---|"
    yield from (_line(row, budget_mib) for row in rows)


if __name__ == "__main__":
    sys.exit(main())
