"""A fine-tuning as a job of the daemon: a small file of all its options, and fingerprints of the model's weights and
data. Torch-free.

The first line is the job. If it federates, the initial adapter of a federation led from here follows, as a safetensors
file.
"""

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec

from port_agent.finetuning.inputs.model_files import CONFIG, check_model_files, fingerprints, weight_files
from port_agent.finetuning.inputs.options import FinetuneError, FinetuneOptions
from port_agent.finetuning.result import check_result_place
from port_agent.finetuning.text.records import Records
from port_agent.finetuning.text.sources import files_of
from port_planner.base.units import shown
from port_planner.ir.device_kinds import CPU

_LARGEST_BYTES = 1 << 20
"""Largest size in bytes of a job, which contains options and a line for each of the model's files."""

_Positive = Annotated[int, msgspec.Meta(gt=0)]


class FinetuneJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained, with which memory and threads, and the state of the files at submission.

    `threads` is fixed, because another number may sum in another order. `weights`: fingerprints by file name;
    `data_sha256`: of the data's bytes. `sequences`: number to train on; None if the job does not federate.
    """

    options: FinetuneOptions
    ram_bytes: _Positive
    threads: _Positive
    page_dir: str
    weights: dict[str, str]
    data_sha256: str
    sequences: _Positive | None = None

    @classmethod
    def of(cls, options: FinetuneOptions, *, ram_bytes: int, threads: int, page_dir: Path) -> "FinetuneJob":
        """Return the job of a fine-tuning with its files as they are now. Raises FinetuneError and OSError.

        The job may replace the contents of `--out`, which were checked here: a worker killed after writing its result
        writes it once more.
        """
        check_result_place(options)
        if options.device != CPU:
            raise FinetuneError(
                f"a submitted fine-tuning computes on the CPU, not on {options.device}; leave out --device"
            )
        return cls(
            options=replace(options, json=False, overwrite=True),
            ram_bytes=ram_bytes,
            threads=threads,
            page_dir=str(page_dir.absolute()),
            weights=fingerprints(Path(options.model)),
            data_sha256=_data_sha256(options),
        )

    @classmethod
    def read(cls, path: Path) -> "FinetuneJob":
        """Return the job in a file. Raises FinetuneError for a file that is not a job, and OSError."""
        try:
            with path.open("rb") as stream:
                line = stream.readline(_LARGEST_BYTES + 1)
            if len(line) > _LARGEST_BYTES:
                raise FinetuneError(
                    f"{path} is larger than a fine-tuning job can be; submit it with `port-agent finetune --submit`"
                )
            job = msgspec.json.decode(line, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise FinetuneError(
                f"{path} is not a valid fine-tuning job ({error}); submit it with `port-agent finetune --submit`"
            ) from error
        for place in job.places:
            if not Path(place).is_absolute() or "\0" in place:
                raise FinetuneError(
                    f"{shown(place)} is not a valid absolute path; submit it with `port-agent finetune --submit`"
                )
        return job

    @property
    def places(self) -> tuple[str, ...]:
        """The model's directory, the data, and the directories of the result and of the pages."""
        return self.options.model, *self.options.data, *self.options.valid, self.options.out, self.page_dir

    def encoded(self) -> bytes:
        """Return the file's first line."""
        return msgspec.json.encode(self)

    def check_reachable(self, whose: str) -> None:
        """Raise FinetuneError if this process may not read what it trains on, or may not write the result."""
        folder = Path(self.options.model)
        try:
            read = [folder / CONFIG, *weight_files(folder), *_data_files(self.options)]
        except OSError:
            read = [folder / CONFIG]
        for path in read:
            if not os.access(path, os.R_OK):
                raise FinetuneError(
                    f"{whose} cannot read {path}; grant it permission (/home is hidden from the shipped service: "
                    "copy it to a place that the agent sees), or run `port-agent finetune --opportunistic` "
                    "yourself"
                )
        for place in (Path(self.options.out).parent, Path(self.page_dir)):
            if not os.access(place, os.W_OK | os.X_OK):
                raise FinetuneError(
                    f"{whose} cannot write to {place}; grant it permission (the shipped service also needs a "
                    "ReadWritePaths= line, `systemctl edit port-agent`), or run `port-agent finetune "
                    "--opportunistic` yourself"
                )

    def check_files(self) -> None:
        """Raise FinetuneError, naming the file, if weights or data changed since the job was submitted; raises OSError."""
        folder = Path(self.options.model)
        check_model_files(folder)
        found = fingerprints(folder)
        changed = [name for name in sorted({*found, *self.weights}) if found.get(name) != self.weights.get(name)]
        if changed or _data_sha256(self.options) != self.data_sha256:
            what = str(folder / changed[0]) if changed else ", ".join((*self.options.data, *self.options.valid))
            raise FinetuneError(
                f"{what} has changed since the job was submitted; restore it, or submit the fine-tuning again"
            )


def _data_sha256(options: FinetuneOptions) -> str:
    Records(*map(Path, options.data))  # rejects data with nothing to train on
    seen = hashlib.sha256()
    for path in _data_files(options):
        with path.open("rb") as stream:
            seen.update(hashlib.file_digest(stream, "sha256").digest())
    return seen.hexdigest()


def _data_files(options: FinetuneOptions) -> list[Path]:
    return [file for path in (*options.data, *options.valid) for file in files_of(Path(path))]
