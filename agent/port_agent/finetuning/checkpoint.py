"""Checkpoints of a fine-tuning: an interruption loses little, and changes no bit of what follows."""

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
from port_agent.finetuning.inputs.earlier_adapter import ADAPTER_WEIGHTS
from port_agent.finetuning.inputs.on_device import on_host, set_random_states
from port_agent.finetuning.inputs.options import Compute, FinetuneError, FinetuneOptions
from port_agent.finetuning.inputs.run_date import forget_run, keep_for_resuming, state_folder
from port_agent.system.atomic_file import atomic_stream
from port_planner.exactness.applied_arithmetic import set_arithmetic
from port_planner.ir.arithmetic import Arithmetic
from port_planner.ir.device_kinds import CPU
from port_planner.ir.torch_arithmetic import arithmetic

_NAME, _ROUND_NAME, _LOSSES_SUFFIX, _BEST_SUFFIX = "checkpoint.pt", "round.pt", ".losses", ".best"

_GENERATORS = "generator", "device_generator"
"""Names of the states of torch's generator and of the device's, which is absent on the CPU."""

_DEFAULTS = FinetuneOptions("", (), "")
_LATER_SETTINGS = (
    "autocast", "begin_from", "alpha", "rslora", "dora", "borders", "dpo", "orpo", "dropout", "weight_decay", "warm_up", "schedule", "evaluate_every", "patience", "proximal_mu", "device"
)  # fmt: skip

_DAMAGED = (RuntimeError, ValueError, KeyError, EOFError, OSError, NotImplementedError, zipfile.BadZipFile)
"""Exceptions that torch raises for a damaged file."""


@dataclass(frozen=True, slots=True)
class FinetuneProgress:
    """The progress so far: the number of `updates`, the held-out loss before the first, and all losses."""

    updates: int
    loss_before: float | None
    curve: Curve = field(default_factory=Curve)


class Checkpoint:
    """The file next to the result from which a fine-tuning resumes.

    `round`: the unique name of a federation's round.
    """

    def __init__(
        self,
        options: FinetuneOptions,
        sequences: Sequence[Any],
        base: BaseRecord,
        round: str | None = None,
        held_out: Sequence[Any] = (),
    ) -> None:
        self._base, self._round = base, round
        self._compute, self._device = options.compute or Compute.STORED, options.device
        self._out, self._date, self._answer_tokens = Path(options.out), options.date, options.answer_tokens
        self.path = checkpoint_path(options, round)
        settings = msgspec.to_builtins(
            replace(options, sample=None, json=False, show_data=1, overwrite=False, float32_result=False)
        )
        del settings["accumulate_by"]  # does not change any bit
        del settings["date"], settings["answer_tokens"]  # are part of the sequences
        del settings["events"]  # only changes what is shown
        for name in _LATER_SETTINGS:
            if settings[name] == getattr(_DEFAULTS, name):
                del settings[name]  # older checkpoints lack this setting
        if self._compute is Compute.STORED:
            del settings["compute"]  # older checkpoints lack this one, too
        encoded = msgspec.json.encode(settings)
        made_of = hashlib.sha256(encoded)
        _add_sequences(made_of, sequences)
        made_of.update((round or "").encode())
        self._id = made_of.hexdigest()
        self._best = self.path.with_suffix(_BEST_SUFFIX)
        evaluated = hashlib.sha256()
        _add_sequences(evaluated, held_out)
        self._held_out = evaluated.hexdigest()
        begun = {} if options.begin_from is None else _adapter_fingerprint(Path(options.begin_from))
        evaluated.update(msgspec.json.encode((self._id, base.files, begun), order="deterministic"))
        self.losses = HeldOutLosses(self.path.with_suffix(_LOSSES_SUFFIX), evaluated.hexdigest())
        """Losses of held-out texts that an interrupted evaluation has computed."""

    def write(
        self,
        progress: FinetuneProgress,
        trained: Sequence[torch.Tensor],
        parts: dict[str, Any],
        generators: Sequence[torch.Tensor],
    ) -> None:
        """Write the checkpoint; the old one stays until the new one is complete.

        `generators`: what `random_states` returned. Raises OSError.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        keep_for_resuming(self._out, self._date, self._answer_tokens)
        with atomic_stream(self.path, 0) as stream:
            torch.save(
                {
                    "id": self._id,
                    "files": self._base.files,
                    "held_out": self._held_out,
                    "updates": progress.updates,
                    "loss_before": progress.loss_before,
                    "losses": progress.curve.losses,
                    "evaluations": [(one.updates, one.loss) for one in progress.curve.evaluations],
                    "trained": on_host([t.detach() for t in trained]),
                    **dict(zip(_GENERATORS, generators, strict=False)),
                    "arithmetic": tuple(arithmetic()),
                    "compute": self._compute.value,
                    **{name: on_host(part.state_dict()) for name, part in parts.items()},
                },
                stream,
            )

    def read(self, trained: Sequence[torch.Tensor], parts: dict[str, Any]) -> FinetuneProgress | None:
        """Restore everything from the checkpoint; return None if there is none, or if it belongs to another round.

        Raises FinetuneError for a checkpoint with different settings, data or weights, or a damaged one. Raises UnavailableArithmeticError
        if torch can no longer compute as it did then.
        """
        if not self.path.is_file():
            return None
        try:
            _check_sums(self.path)
            found = torch.load(self.path, map_location=CPU, weights_only=True, mmap=True)
        except _DAMAGED as error:
            raise FinetuneError(f"{self.path} is damaged ({error}); remove it to start again") from error
        if found["id"] != self._id and self._round is not None:
            return None
        if found["id"] != self._id:
            raise FinetuneError(
                f"{self.path} belongs to other settings or other data; give another --out, or remove it to start again"
            )
        if found.get("held_out", self._held_out) != self._held_out:  # absent if an older agent wrote it
            raise FinetuneError(
                f"{self.path} belongs to other held-out text, whose losses cannot be compared with those of this one; "
                "restore it, give another --out, or remove the checkpoint to start again"
            )
        files = found.get("files")  # absent if an older agent wrote it
        if files is not None and files != self._base.files:
            msgspec.structs.replace(self._base, files=files).check(Path(self._base.model))
        _copy(found["trained"], trained)
        for name, part in parts.items():
            part.load_state_dict(found[name])
        set_random_states(self._device, [found[name] for name in _GENERATORS if name in found])
        if "arithmetic" in found:  # absent if an older agent wrote it
            set_arithmetic(Arithmetic(*found["arithmetic"]))
        evaluations = [CurvePoint(*one) for one in found.get("evaluations", ())]
        return FinetuneProgress(found["updates"], found["loss_before"], Curve(found.get("losses", []), evaluations))

    def keep_best(self, updates: int, trained: Sequence[torch.Tensor]) -> None:
        """Keep the weights after `updates` updates next to the checkpoint. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_stream(self._best, 0) as stream:
            torch.save({"id": self._id, "updates": updates, "trained": on_host([t.detach() for t in trained])}, stream)

    def restore_best(self, updates: int, trained: Sequence[torch.Tensor]) -> None:
        """Restore the weights after `updates` updates. Raises FinetuneError if they are missing or damaged."""
        try:
            _check_sums(self._best)
            found = torch.load(self._best, map_location=CPU, weights_only=True, mmap=True)
        except _DAMAGED as error:
            raise FinetuneError(f"{self._best}, the best weights, is damaged ({error}); train again") from error
        if (found["id"], found["updates"]) != (self._id, updates):
            raise FinetuneError(f"{self._best} does not hold update {updates}, the best one; train again")
        _copy(found["trained"], trained)

    def remove(self) -> None:
        """Remove the checkpoint, after the result is written."""
        self.path.unlink(missing_ok=True)
        self._best.unlink(missing_ok=True)
        self.losses.remove()
        forget_run(self._out)
        if self.path.parent.is_dir() and not any(self.path.parent.iterdir()):
            self.path.parent.rmdir()


def _add_sequences(digest: "hashlib._Hash", sequences: Sequence[Any]) -> None:
    for sequence in sequences:
        digest.update(repr(sequence).encode())


def _adapter_fingerprint(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of an adapter's file by its name; empty if it cannot be read, which is reported when it is needed."""
    path = folder / ADAPTER_WEIGHTS
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()} if path.is_file() else {}


def _copy(kept: Sequence[torch.Tensor], trained: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor, one in zip(trained, kept, strict=True):
            tensor.copy_(one)


def checkpoint_path(options: FinetuneOptions, round: str | None = None) -> Path:
    """Return the path of a fine-tuning's checkpoint; `round`: name of a federation's round."""
    return state_folder(Path(options.out)) / (_NAME if round is None else _ROUND_NAME)


def _check_sums(path: Path) -> None:
    """Verify the checksum of each part of a torch file, which is a zip archive; torch maps the parts without comparing
    checksums.

    Raises BadZipFile for a damaged part, and NotImplementedError and OSError.
    """
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise zipfile.BadZipFile(f"the checksum of {damaged} differs")
