"""Bundles with something changed at random, hashes fitting again, loaded and trained in processes of
their own: no signal ever.
"""

import collections
import os
import random
import resource
import signal
import warnings
from functools import partial
from pathlib import Path

import torch

from port_agent.training.trainer import Trainer
from port_planner.base.errors import PortError
from port_planner.ir.bundle.bundle import Bundle
from tests.agent.training.options import train_options
from tests.attack.children import lines_of_child
from tests.attack.outcome import AttackOutcome
from tests.planner.bundles import members, write_mutated

_MEMORY_BYTES = 3 << 30
"""Of a child: sizes that are huge are refused by the allocator, not by the machine."""
_PATIENCE_S = 20
_BATCH = 25
"""Bundles in one child."""
_NO_BUNDLE = "not to be written"
"""A change that no file can hold."""


def attack_with_bundles(scratch: Path, original: Path, *, seed: int, count: int) -> AttackOutcome:
    """Train `count` bundles, each made from `original` by a random change, for two steps with evaluation and result."""
    content = members(original)
    endings: collections.Counter[str] = collections.Counter()
    harmed = []
    begin = 0
    while begin < count:
        end = min(begin + _BATCH, count)
        made, status = lines_of_child(partial(_train_all, scratch, content, seed, range(begin, end)))
        endings.update(made)
        begin += len(made) + (status != 0)
        if status == -signal.SIGALRM:
            endings[f"stopped after {_PATIENCE_S} s"] += 1
        elif status:
            harmed.append(
                f"bundle {begin - 1} of seed {seed}: " + (f"signal {-status}" if status < 0 else f"exit {status}")
            )
    tried = count - endings.pop(_NO_BUNDLE, 0)
    notes = ", ".join(f"{n} {ending}" for ending, n in sorted(endings.items()))
    return AttackOutcome("hostile bundles", tried, tried - len(harmed), tuple(harmed), notes)


def _train_all(scratch: Path, content: dict[str, bytes], seed: int, which: range, fd: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MEMORY_BYTES, _MEMORY_BYTES))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for i in which:
        signal.alarm(_PATIENCE_S)
        os.write(fd, f"{_train_one(scratch / str(i), content, random.Random(f'{seed}/{i}'))}\n".encode())
    os._exit(0)


def _train_one(folder: Path, content: dict[str, bytes], rng: random.Random) -> str:
    folder.mkdir()
    path = folder / "job.port"
    try:
        write_mutated(rng, content, path)
    except (ValueError, TypeError, AttributeError, OverflowError):
        return _NO_BUNDLE
    trainer = None
    try:
        trainer = Trainer(Bundle(path), train_options(folder, folder, plan=rng.randrange(2), steps=2))
        trainer.start()
        trainer.train(lambda _: None, lambda *_: None)
        trainer.evaluate()
        trainer.save_weights(folder / "out.safetensors")
    except PortError:
        return "refused"
    except Exception as error:  # as the worker's frame has it: one line, whatever it is
        return f"ended by {type(error).__name__}"
    finally:
        if trainer is not None:
            trainer.close()
    return "trained"
