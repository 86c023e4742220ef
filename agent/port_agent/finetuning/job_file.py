"""A fine-tuning as a job of the daemon: a small file that says all, and what the model's weights and data were then. Torch-free.

Its first line is the job. After that one that federates has the adapter, a safetensors file, that a federation led from here begins with.
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

_LARGEST_BYTES = 1 << 20
"""Of a job: it has options and a line for each of the model's files."""

_Positive = Annotated[int, msgspec.Meta(gt=0)]


class FinetuneJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained, within how much memory, on how many threads, and what its files were when it was submitted.

    `threads` is fixed: another number may sum in another order. `weights`: fingerprints by file name; `data_sha256`: of the
    data's bytes. `sequences`: so many are trained on; None where it does not federate.
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
        """Return the job of a fine-tuning whose files are as they are now. Raises FinetuneError and OSError.

        It replaces what is at `--out`, where nothing is now that may not be: a worker that is killed behind its result writes it once more.
        """
        check_result_place(options)
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
        """Return what a file says. Raises FinetuneError for one that is no such job, and OSError."""
        try:
            with path.open("rb") as stream:
                line = stream.readline(_LARGEST_BYTES + 1)
            if len(line) > _LARGEST_BYTES:
                raise FinetuneError(
                    f"{path} is larger than a fine-tuning's job; submit it with `port-agent finetune --submit`"
                )
            job = msgspec.json.decode(line, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise FinetuneError(
                f"{path} is no fine-tuning's job ({error}); submit it with `port-agent finetune --submit`"
            ) from error
        for place in job.places:
            if not Path(place).is_absolute() or "\0" in place:
                raise FinetuneError(
                    f"{shown(place)} is not a valid absolute path; submit it with `port-agent finetune --submit`"
                )
        return job

    @property
    def places(self) -> tuple[str, ...]:
        """The model's directory, the data, where the result goes, and where pages go."""
        return self.options.model, *self.options.data, *self.options.valid, self.options.out, self.page_dir

    def encoded(self) -> bytes:
        """Return the file's first line."""
        return msgspec.json.encode(self)

    def check_reachable(self, whose: str) -> None:
        """Raise FinetuneError where this process may not read what it trains on, or not write where it is to."""
        folder = Path(self.options.model)
        try:
            read = [folder / CONFIG, *weight_files(folder), *_data_files(self.options)]
        except OSError:
            read = [folder / CONFIG]
        for path in read:
            if not os.access(path, os.R_OK):
                raise FinetuneError(
                    f"{whose} cannot read {path}; give it the right (for the shipped service /home is hidden: copy it to a place "
                    "that the service sees), or run `port-agent finetune --opportunistic` yourself"
                )
        for place in (Path(self.options.out).parent, Path(self.page_dir)):
            if not os.access(place, os.W_OK | os.X_OK):
                raise FinetuneError(
                    f"{whose} cannot write into {place}; give it the right (for the shipped service also a ReadWritePaths= line, "
                    "`systemctl edit port-agent`), or run `port-agent finetune --opportunistic` yourself"
                )

    def check_files(self) -> None:
        """Raise FinetuneError by name where weights or data are others than when it was submitted, and OSError."""
        folder = Path(self.options.model)
        check_model_files(folder)
        found = fingerprints(folder)
        changed = [name for name in sorted({*found, *self.weights}) if found.get(name) != self.weights.get(name)]
        if changed or _data_sha256(self.options) != self.data_sha256:
            what = str(folder / changed[0]) if changed else ", ".join((*self.options.data, *self.options.valid))
            raise FinetuneError(
                f"{what} has changed since the job was submitted; put it back, or submit the fine-tuning anew"
            )


def _data_sha256(options: FinetuneOptions) -> str:
    Records(*map(Path, options.data))  # or there is nothing to train on
    seen = hashlib.sha256()
    for path in _data_files(options):
        with path.open("rb") as stream:
            seen.update(hashlib.file_digest(stream, "sha256").digest())
    return seen.hexdigest()


def _data_files(options: FinetuneOptions) -> list[Path]:
    return [file for path in (*options.data, *options.valid) for file in files_of(Path(path))]
