"""A fine-tuning and a merge that are killed at one of their operations on files: functions of `tests.forked`."""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from port_agent.finetuning.inputs.options import Compute, FinetuneOptions
from port_agent.finetuning.merge import merge_adapter
from port_agent.finetuning.training import finetune
from tests.agent.finetuning.tiny_model import TEXT, make_model

_OPERATIONS = frozenset(("open", "os.mkdir", "os.remove", "os.rename", "os.rmdir"))
ADAPTER = "adapter"


def prepare(words: Sequence[str]) -> int:
    """Write a model, data and an adapter to a folder."""
    folder = Path(words[0])
    make_model(folder / "model")
    (folder / "data.txt").write_text(TEXT * 8)
    _train(folder, ADAPTER)
    return 0


def run(words: Sequence[str]) -> int:
    """Do the first word's work in a folder; be killed at an operation on files below it, and
    print how many there were.
    """
    what, folder, killed_at = words[0], Path(words[1]), int(words[2])
    count = 0

    def heard(event: str, given: tuple[object, ...]) -> None:
        nonlocal count
        if event in _OPERATIONS and str(given[0]).startswith(f"{folder}/work"):
            count += 1
            if count == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(heard)
    if what == "finetune":
        _train(folder, "work/out")
    else:
        merge_adapter(folder / ADAPTER, folder / "work" / "out", None, lambda share: None, lambda text: None)
    print(count)
    return 0


def _train(folder: Path, out: str) -> None:
    options = FinetuneOptions(
        str(folder / "model"),
        (str(folder / "data.txt"),),
        str(folder / out),
        sequence_tokens=32,
        updates=3,
        evaluate_every=2,
        held_out=0.2,
        overwrite=True,
        compute=Compute.STORED,
    )
    finetune(options, lambda update: None, lambda text: None)
