"""Where a fine-tuning is, kept so that a cut loses little and changes no bit of what follows."""

import hashlib
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from port_agent.finetuning.base_record import BaseRecord
from port_agent.finetuning.curve import Curve, CurvePoint
from port_agent.finetuning.evaluation import HeldOutLosses
from port_agent.finetuning.inputs.options import Compute, FinetuneError, FinetuneOptions
from port_agent.finetuning.inputs.run_date import forget_date, keep_date, state_folder
from port_agent.system.atomic_file import atomic_stream
from port_planner.exactness.arithmetic import arithmetic, set_arithmetic
from port_planner.ir.arithmetic import Arithmetic

_NAME, _ROUND_NAME, _LOSSES_SUFFIX, _BEST_SUFFIX = "checkpoint.pt", "round.pt", ".losses", ".best"

_DEFAULTS = FinetuneOptions("", (), "")
_LATER_SETTINGS = (
    "autocast", "begin_from", "alpha", "rslora", "dora", "borders", "dpo", "dropout", "weight_decay", "warm_up", "schedule", "evaluate_every", "patience"
)  # fmt: skip

_DAMAGED = (RuntimeError, ValueError, KeyError, EOFError, OSError, NotImplementedError, zipfile.BadZipFile)
"""What a file of torch's raises that is damaged."""


@dataclass(frozen=True, slots=True)
class FinetuneProgress:
    """What is done: `updates`, what the held-out text was like before the first, and the course until there."""

    updates: int
    loss_before: float | None
    curve: Curve = field(default_factory=Curve)


class Checkpoint:
    """The file beside the result that a fine-tuning goes on from. `round`: the name of a federation's round, one that differs for each."""

    def __init__(
        self, options: FinetuneOptions, sequences: Sequence[Any], base: BaseRecord, round: str | None = None
    ) -> None:
        self._base, self._round = base, round
        self._compute = options.compute or Compute.STORED
        self._out, self._date = Path(options.out), options.date
        self.path = checkpoint_path(options, round)
        settings = msgspec.to_builtins(
            replace(options, sample=None, json=False, show_data=1, overwrite=False, float32_result=False)
        )
        del settings["accumulate_by"]  # changes no bit
        del settings["date"]  # the sequences are made of it
        del settings["events"]  # only tells
        for name in _LATER_SETTINGS:
            if settings[name] == getattr(_DEFAULTS, name):
                del settings[name]  # was no setting when older ones were written
        if self._compute is Compute.STORED:
            del settings["compute"]  # neither was this
        encoded = msgspec.json.encode(settings)
        made_of = hashlib.sha256(encoded)
        for sequence in sequences:
            made_of.update(repr(sequence).encode())
        made_of.update((round or "").encode())
        self._id = made_of.hexdigest()
        self._best = self.path.with_suffix(_BEST_SUFFIX)
        self.losses = HeldOutLosses(self.path.with_suffix(_LOSSES_SUFFIX), self._id)
        """Of held-out texts, as far as an evaluation under way is."""

    def write(
        self,
        progress: FinetuneProgress,
        trained: Sequence[torch.Tensor],
        parts: dict[str, Any],
        generator: torch.Tensor,
    ) -> None:
        """Write it, the old one standing until the new one is whole; `generator`: the state of torch's. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        keep_date(self._out, self._date)
        with atomic_stream(self.path, 0) as stream:
            torch.save(
                {
                    "id": self._id,
                    "files": self._base.files,
                    "updates": progress.updates,
                    "loss_before": progress.loss_before,
                    "losses": progress.curve.losses,
                    "evaluations": [(one.updates, one.loss) for one in progress.curve.evaluations],
                    "trained": [t.detach() for t in trained],
                    "generator": generator,
                    "arithmetic": tuple(arithmetic()),
                    "compute": self._compute.value,
                    **{name: part.state_dict() for name, part in parts.items()},
                },
                stream,
            )

    def read(self, trained: Sequence[torch.Tensor], parts: dict[str, Any]) -> FinetuneProgress | None:
        """Put everything to where the checkpoint is; None where there is none, or one of another round.

        Raises FinetuneError for one of other settings, data or weights, and for one that is damaged, UnavailableArithmeticError where torch
        cannot compute as it did.
        """
        if not self.path.is_file():
            return None
        try:
            _check_sums(self.path)
            found = torch.load(self.path, weights_only=True, mmap=True)
        except _DAMAGED as error:
            raise FinetuneError(f"{self.path} is damaged ({error}); remove it to begin anew") from error
        if found["id"] != self._id and self._round is not None:
            return None
        if found["id"] != self._id:
            raise FinetuneError(
                f"{self.path} is of other settings or other data; give another --out, or remove it to begin anew"
            )
        files = found.get("files")  # not there: written by an agent that did not look
        if files is not None and files != self._base.files:
            msgspec.structs.replace(self._base, files=files).check(Path(self._base.model))
        _copy(found["trained"], trained)
        for name, part in parts.items():
            part.load_state_dict(found[name])
        torch.set_rng_state(found["generator"].clone())
        if "arithmetic" in found:  # not there: written by an agent that did not look
            set_arithmetic(Arithmetic(*found["arithmetic"]))
        evaluations = [CurvePoint(*one) for one in found.get("evaluations", ())]
        return FinetuneProgress(found["updates"], found["loss_before"], Curve(found.get("losses", []), evaluations))

    def keep_best(self, updates: int, trained: Sequence[torch.Tensor]) -> None:
        """Keep the weights after so many updates beside the checkpoint. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_stream(self._best, 0) as stream:
            torch.save({"id": self._id, "updates": updates, "trained": [t.detach() for t in trained]}, stream)

    def restore_best(self, updates: int, trained: Sequence[torch.Tensor]) -> None:
        """Put the weights to where they were after so many updates. Raises FinetuneError where they are not kept, or damaged."""
        try:
            _check_sums(self._best)
            found = torch.load(self._best, weights_only=True, mmap=True)
        except _DAMAGED as error:
            raise FinetuneError(f"{self._best}, the best weights, is damaged ({error}); train anew") from error
        if (found["id"], found["updates"]) != (self._id, updates):
            raise FinetuneError(f"{self._best} is not of update {updates}, the best one; train anew")
        _copy(found["trained"], trained)

    def remove(self) -> None:
        """Remove it: the result is written."""
        self.path.unlink(missing_ok=True)
        self._best.unlink(missing_ok=True)
        self.losses.remove()
        forget_date(self._out)
        if self.path.parent.is_dir() and not any(self.path.parent.iterdir()):
            self.path.parent.rmdir()


def _copy(kept: Sequence[torch.Tensor], trained: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor, one in zip(trained, kept, strict=True):
            tensor.copy_(one)


def checkpoint_path(options: FinetuneOptions, round: str | None = None) -> Path:
    """Return where the checkpoint of a fine-tuning is; `round`: of a federation."""
    return state_folder(Path(options.out)) / (_NAME if round is None else _ROUND_NAME)


def _check_sums(path: Path) -> None:
    """Read each part of a file that torch wrote, which is a zip archive; torch maps the parts and compares no checksum.

    Raises BadZipFile for a part that is damaged, and NotImplementedError and OSError.
    """
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise zipfile.BadZipFile(f"the checksum of {damaged} differs")
