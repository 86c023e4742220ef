"""The directory of a fine-tuning's result: written by one run at a time, completely or not at
all, never over other files.

Torch-free.
"""

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from port_agent.finetuning.inputs.options import FinetuneError, FinetuneOptions
from port_agent.finetuning.inputs.run_date import state_folder
from port_agent.system.atomic_file import write_atomically


def check_result_place(options: FinetuneOptions) -> None:
    """Raise FinetuneError if the result would be written into the model's directory, or over
    something that already exists.
    """
    out, model = Path(options.out), Path(options.model)
    if model.resolve() in (out.resolve(), *out.resolve().parents):
        raise FinetuneError(f"{out} is inside the model's directory, which is never written to; give another --out")
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists() and not may_replace(options):
        raise FinetuneError(
            f"{out} exists already; give another --out, or --overwrite, which replaces it once the new result is "
            "complete"
        )


def may_replace(options: FinetuneOptions) -> bool:
    """Return whether the contents of `--out` may be replaced: the user allowed it, or this very run wrote them and did
    not finish.
    """
    try:
        return options.overwrite or _writing(options).read_text() == _digest(options)
    except (FileNotFoundError, NotADirectoryError):
        return False


def note_writing(options: FinetuneOptions) -> None:
    """Record next to the checkpoint that this run is writing its result, which shows later that the
    contents of `--out` are its own.

    Raises OSError.
    """
    _writing(options).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(_writing(options), _digest(options).encode())


def forget_writing(options: FinetuneOptions) -> None:
    """Remove the record, after the run has ended and the result is complete."""
    _writing(options).unlink(missing_ok=True)


def _writing(options: FinetuneOptions) -> Path:
    return state_folder(Path(options.out)) / "writing"


def _digest(options: FinetuneOptions) -> str:
    settings = replace(options, sample=None, json=False, show_data=1, overwrite=False, compute=None, events=None)
    return hashlib.sha256(msgspec.json.encode(settings)).hexdigest()


@contextlib.contextmanager
def only_run(options: FinetuneOptions) -> Iterator[None]:
    """Raise FinetuneError while another run, in any process, uses the same `--out`.

    Raises OSError if nothing can be stored there.
    """
    folder = state_folder(Path(options.out))
    descriptor = _locked(folder)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # it holds a checkpoint
            folder.rmdir()
        os.close(descriptor)


def _locked(folder: Path) -> int:
    """Return a locked descriptor of a directory, which is created if it does not exist.

    Raises FinetuneError and OSError.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:  # the run that had it has ended since
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise FinetuneError(
                f"another fine-tuning is writing to {folder.with_suffix('')}; wait for it, or give another --out"
            ) from error
        if _is_at(folder, descriptor):
            return descriptor
        os.close(descriptor)


def _is_at(folder: Path, descriptor: int) -> bool:
    """Return whether a directory is still the one that was opened."""
    try:
        return os.path.samestat(folder.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
