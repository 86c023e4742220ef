"""`make demo-llm`: a small language model learns to write, then another style, inside a budget;
proof that it is the same.

A Llama of 2 million weights is trained from scratch on the shipped Shakespeare (`language_model/pretrain.py`, an
ordinary script, through `port-agent exec`). `port-agent finetune` then teaches it to write the same as notes:
lines in lower case, each with a dash. The recipe runs a second time without a budget; perplexities and the
adapter's bytes are compared.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from examples.demo import disk
from port_agent.finetuning.inputs.options import FinetuneOptions

HERE = Path(__file__).parent
TEXT = HERE / "shakespeare" / "tinyshakespeare.txt"
RAM = "700M"
UPDATES, TUNED, LEARNING_RATE = 400, 120, 2e-3
STYLE_CHARACTERS = 60_000
"""From the end of the text: the model has seen them, in their own style."""
PROMPT = "- my lord"


def as_notes(text: str) -> str:
    """Return a text in another style: what is said, without who says it, in lower case with a dash before each line."""
    lines = (line.strip().lower().rstrip(",;:.!?") for line in text.splitlines() if not line.endswith(":"))
    return "".join(f"- {line}\n" for line in lines if line)


def main() -> int:
    """Run the demo; the exit code is 0 only if it learned and the bits are equal."""
    console = Console()
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory(prefix="port-demo-llm-", dir=disk()) as name:
        folder = Path(name)
        model, notes = folder / "model", folder / "notes.txt"
        notes.write_text(as_notes(TEXT.read_text()[-STYLE_CHARACTERS:]))
        console.print(f"[bold]1. From scratch[/]: port-agent exec --ram {RAM} -- pretrain.py")
        words = [str(HERE / "language_model" / "pretrain.py"), str(TEXT), str(model), "--updates", str(UPDATES)]
        port_agent("exec", "--ram", RAM, "--page-dir", name, "--", *words, environment=environment)
        console.print(f"[bold]2. Another style[/]: port-agent finetune model --data notes.txt --ram {RAM}")
        asked = FinetuneOptions(
            str(model),
            (str(notes),),
            str(folder / "plain"),
            targets=("q_proj", "v_proj", "up_proj", "down_proj"),
            sequence_tokens=96,
            updates=TUNED,
            learning_rate=LEARNING_RATE,
            sample=PROMPT,
            json=True,
        )
        printed = port_agent(
            "finetune", str(model), "--data", str(notes), "--out", str(folder / "mine"), "--ram", RAM, "--page-dir", name,
            "--targets", ",".join(asked.targets), "--seq-len", str(asked.sequence_tokens), "--updates", str(TUNED),
            "--lr", str(LEARNING_RATE), "--sample", PROMPT, "--json", environment=environment, quiet=True,
        )  # fmt: skip
        console.print("[bold]3. The same recipe[/] in plain PyTorch, without a budget")
        command = [sys.executable, "-m", "port_agent.cli.finetune", json.dumps(asdict(asked))]
        plain = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout
        weights = "adapter_model.safetensors"
        equal = (folder / "mine" / weights).read_bytes() == (folder / "plain" / weights).read_bytes()
        return report(console, finished(printed), finished(plain), equal=equal)


def port_agent(*words: str, environment: dict[str, str], quiet: bool = False) -> str:
    """Run a command; return what it printed where it is `quiet`."""
    command = [sys.executable, "-m", "port_agent.cli", *words]
    stdout = subprocess.PIPE if quiet else None
    return subprocess.run(command, stdout=stdout, text=True, check=True, env=environment).stdout or ""


def finished(printed: str) -> dict[str, Any]:
    """Return the last event."""
    event: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return event


def report(console: Console, mine: dict[str, Any], plain: dict[str, Any], *, equal: bool) -> int:
    """Print what came of it; return the exit code."""
    table = Table("", "in the budget", "plain PyTorch", title="a new style, learned")
    for row, key in (("held-out loss before", "loss_before"), ("after", "loss_after")):
        table.add_row(row, f"{mine[key]:.6f}", f"{plain[key]:.6f}")
    for row, key in (("it wrote", "sample_before"), ("it writes", "sample_after")):
        table.add_row(row, mine[key], plain[key])
    table.add_row("adapter", "the same bytes" if equal else "other bytes", "")
    console.print(table)
    same = equal and all(mine[key] == plain[key] for key in ("loss_before", "loss_after", "sample_after"))
    learned = mine["loss_after"] < mine["loss_before"]
    console.print("[green]learned, equal to the bit[/]" if same and learned else "[red]it is not the same[/]")
    return 0 if same and learned else 1


if __name__ == "__main__":
    sys.exit(main())
