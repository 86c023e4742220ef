"""`finetune --compute float32` compared with `stored` and with plain float32, on a processor that
does not multiply bfloat16.

`python -m benchmarks.compute_type [FAMILY ...]` trains a model of random weights three ways and prints bits, memory and
time of an update. The libraries may use no instructions beyond AVX2. Each run is a process of its own with one thread:
`benchmarks/compute_type.py --run KIND FOLDER`. Needs 1 GB in /var/tmp.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FAMILIES = ("llama", "qwen3", "gemma2", "gemma3_text", "gpt2")
KINDS = ("plain", "stored", "float32")
AVX2_ALONE = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "1"}
HIDDEN, LAYERS, WORDS, TOKENS, UPDATES = 1024, 6, 16_000, 64, 3
RAM = "8G"
"""More than any of them needs: `exec` counts memory, and pages nothing."""


def make(family: str, folder: Path) -> None:
    """Write a model in bfloat16, the same one in float32, and data."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.agent.finetuning.tiny_model import make_data, make_model, shape_of

    make_model(folder / "bfloat16", kind=family, vocabulary=WORDS)
    make_data(folder / "data.jsonl")
    layers, heads = ("n_layer", "n_head") if family == "gpt2" else ("num_hidden_layers", "num_attention_heads")
    shape = {**shape_of(family, HIDDEN), layers: LAYERS, heads: 16}
    if "head_dim" in shape:
        shape["head_dim"] = HIDDEN // 16
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(vocab_size=WORDS, **shape), dtype=torch.bfloat16)
    model.save_pretrained(folder / "bfloat16")
    model.float().save_pretrained(folder / "float32")
    for file in (folder / "bfloat16").iterdir():
        if not (folder / "float32" / file.name).exists():
            shutil.copy(file, folder / "float32")


def run(kind: str, folder: Path) -> None:
    """Train one way, and print the bits and the CPU seconds of an update as a line of JSON."""
    import torch

    from port_agent.finetuning.inputs.options import Compute, FinetuneOptions
    from port_agent.finetuning.training import finetune

    torch.set_num_threads(1)
    plain, out = kind == "plain", folder / f"out-{kind}"
    options = FinetuneOptions(
        str(folder / ("float32" if plain else "bfloat16")),
        (str(folder / "data.jsonl"),),
        str(out),
        overwrite=True,
        sequence_tokens=TOKENS,
        updates=UPDATES,
        held_out=0.0,
        compute=None if plain else Compute(kind),
    )
    losses, ends = list[str](), list[float]()

    def report(update: Any) -> None:
        losses.append(update.loss.hex())
        ends.append(time.process_time())

    finetune(options, report, lambda text: None)
    adapter = hashlib.sha256((out / "adapter_model.safetensors").read_bytes()).hexdigest()
    print(json.dumps({"bits": [*losses, adapter], "seconds": (ends[-1] - ends[0]) / (UPDATES - 1)}))


def measured(kind: str, folder: Path) -> dict[str, Any]:
    """Return what a run gave and took; the second run is counted, because it compares no products first."""
    report = folder / "report.json"
    command = [sys.executable, "-W", "ignore", "-m", "port_agent.cli", "exec", "--ram", RAM, "--page-dir", str(folder)]
    command += ["--report", str(report), "--", __file__, "--run", kind, str(folder)]
    told = ""
    for _ in range(2 if kind == "float32" else 1):
        told = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, **AVX2_ALONE}
        ).stdout
    return {**json.loads(told.splitlines()[-1]), **json.loads(report.read_text())}


def main(arguments: list[str]) -> None:
    """Print a row for each family."""
    if arguments[:1] == ["--run"]:
        run(arguments[1], Path(arguments[2]))
        return
    print("| model | bits | process MiB: plain, stored, float32 | tensors MiB | CPU s an update | stored / float32 |")
    print("|---|---|---|---|---|---|")
    for family in arguments or FAMILIES:
        with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
            make(family, Path(folder))
            found = [measured(kind, Path(folder)) for kind in KINDS]
        plain, stored, wide = found
        bits = "equal" if plain["bits"] == wide["bits"] else "OTHER"
        process, tensors = (
            ", ".join(f"{one[name] / 2**20:.0f}" for one in found)
            for name in ("peak_resident_bytes", "peak_tensor_bytes")
        )
        times = ", ".join(f"{one['seconds']:.2f}" for one in found)
        ratio = stored["seconds"] / wide["seconds"]
        print(f"| {family} | {bits} | {process} | {tensors} | {times} | {ratio:.1f} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
