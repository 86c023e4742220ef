"""The command line of every worker, defined once.

Whatever starts a worker writes these options, and the worker reads them.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self, get_args, get_origin, get_type_hints

from port_agent.system.python_process import module_command
from port_agent.worker.shard import Shard
from port_planner.base.units import parse_bytes

TORCH_WORKER = module_command("port_agent.training.worker")
LOADED_WORKER = module_command("port_agent.training.loaded_worker")
BOARD_WORKER = module_command("port_agent.mcu.board_worker")
FINETUNE_WORKER = module_command("port_agent.finetuning.job.start")
"""The command of a fine-tuning's worker."""

CONTROL_FD_PLACE = "{control_fd}"
"""Stands for the control descriptor in a command line that is written before the descriptor exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """The start options of every worker; None leaves the choice to the worker."""

    bundle: Path = field(metadata={"help": "the bundle, or what describes a board's job"})
    state_dir: Path = field(metadata={"help": "checkpoints, from which the next run resumes"})
    control_fd: int | None = field(
        default=None, metadata={"help": "inherited descriptor of the connection to the supervisor"}
    )
    plan: int | None = field(
        default=None, metadata={"help": "which plan of the bundle; a board has one, its firmware, and passes over this"}
    )
    data: Path | None = field(
        default=None, metadata={"help": "train on the files of this directory instead of the bundle's samples"}
    )
    epochs: int | None = field(
        default=None, metadata={"help": "passes over the data, counted from the beginning of the round"}
    )
    steps: int | None = field(default=None, metadata={"help": "batches (for a board: samples) instead of epochs"})
    out: Path | None = field(default=None, metadata={"help": "file for the trained weights"})
    checkpoint_every: int | None = field(
        default=None, metadata={"help": "steps (for a board: samples) between checkpoints"}
    )
    round: int | None = field(default=None, metadata={"help": "a new number restarts epochs with the current weights"})
    user: str | None = field(
        default=None, metadata={"help": "whose rights a fine-tuning takes where it was started with root's"}
    )

    def words(self) -> list[str]:
        """Return the options as words of a command line."""
        words: list[str] = []
        for one in fields(self):
            value, flag = getattr(self, one.name), _flag(one.name)
            if value is True:
                words.append(flag)
            elif isinstance(value, tuple):
                words += [word for part in value for word in (flag, str(part))]
            elif value is not None and value is not False:
                words += [flag, str(value)]
        return words

    @classmethod
    def parse(cls, words: Sequence[str] | None, *, program: str) -> Self:
        """Return the options of a command line (None: this process's); end the process if they are wrong."""
        parser = argparse.ArgumentParser(prog=program)
        types = get_type_hints(cls)
        for one in fields(cls):
            needed = one.name in ("bundle", "state_dir")
            argument: dict[str, Any] = {"required": needed, **one.metadata}
            if types[one.name] is bool:
                argument["action"] = "store_true"
            elif get_origin(types[one.name]) is tuple:
                argument |= {"action": "append", "type": get_args(types[one.name])[0], "default": []}
            else:
                kinds = [kind for kind in get_args(types[one.name]) or (types[one.name],) if kind is not type(None)]
                argument.setdefault("type", kinds[0])
                argument["default"] = None if needed else one.default
            parser.add_argument(_flag(one.name), **argument)
        given: dict[str, Any] = vars(parser.parse_args(words))
        several = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        return cls(**(given | several))


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOptions(WorkerOptions):
    """The additional options of a training bundle's worker.

    With `weights`, as in each round of a federation, rounds from 1 on continue in the data where the previous
    ones ended, with new masks.
    """

    page_dir: Path | None = field(
        default=None, metadata={"help": "where temporaries are paged to; default: the state directory"}
    )
    scratch_dirs: tuple[Path, ...] = field(
        default=(),
        metadata={"help": "a directory on each further medium that the bundle was planned for, in that order"},
    )
    weights: Path | None = field(
        default=None,
        metadata={"help": "begin with the tensors of this file instead of the bundle's of the same names"},
    )
    verify: int = field(default=0, metadata={"help": "number of first losses to compare with plain PyTorch's"})
    referee: bool = field(
        default=False,
        metadata={"help": "repeat the script's lone run from planning, and compare with that instead"},
    )
    digest: bool = field(default=False, metadata={"help": "report a checksum over all persistent tensors at the end"})
    revision: Path | None = field(
        default=None, metadata={"help": "plans of the bundle made again for what its steps take, instead of its own"}
    )
    probe_packing: bool = field(
        default=False, metadata={"help": "report at the end what packing the step's tensors would take"}
    )
    discard: bool = field(default=False, metadata={"help": "commit no step: the trained weights are discarded"})
    read_limit: int | None = field(
        default=None, metadata={"help": "throttle reads to this many bytes per second", "type": parse_bytes}
    )
    write_limit: int | None = field(
        default=None, metadata={"help": "throttle writes to this many bytes per second", "type": parse_bytes}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneWorkerOptions(WorkerOptions):
    """The additional options of a fine-tuning's worker."""

    weights: Path | None = field(
        default=None,
        metadata={
            "help": "of a federation: the adapter that round --round begins with; without --round it is the result"
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardOptions(WorkerOptions):
    """The additional options of a microcontroller job's worker; each overrides the job's file."""

    test: Path | None = field(default=None, metadata={"help": "samples that are held out"})
    board: str | None = field(default=None, metadata={"help": "the board's name"})
    port: str | None = field(default=None, metadata={"help": "its serial port"})
    serial: str | None = field(default=None, metadata={"help": "its serial number"})
    simulate: bool = field(default=False, metadata={"help": "run the firmware as a process on this machine"})
    shard: Shard | None = field(
        default=None, metadata={"help": "train only part K of N of the samples, such as 2/3", "type": Shard.parse}
    )


def page_words(page_dirs: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments that give a torch worker its page directories:
    `TorchOptions.page_dir`, then `scratch_dirs`.
    """
    names = ("page_dir", *["scratch_dirs"] * (len(page_dirs) - 1))
    return tuple(word for name, folder in zip(names, page_dirs, strict=False) for word in (_flag(name), folder))


def weights_words(weights: Path | None) -> tuple[str, ...]:
    """Return the arguments that give a worker its initial weights: `TorchOptions.weights`,
    `FinetuneWorkerOptions.weights`.
    """
    return () if weights is None else (_flag("weights"), str(weights))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
