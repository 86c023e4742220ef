"""Where a fine-tuning's result goes: by one run at a time, never over what is there, whole or not at all. Torch-free."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from port_agent.finetuning.inputs.options import FinetuneError, FinetuneOptions
from port_agent.finetuning.inputs.run_date import state_folder


def check_result_place(options: FinetuneOptions) -> None:
    """Raise FinetuneError where the result would be written into the model's directory, or over something that is there."""
    out, model = Path(options.out), Path(options.model)
    if model.resolve() in (out.resolve(), *out.resolve().parents):
        raise FinetuneError(f"{out} is within the model's directory, which is never written into; give another --out")
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists() and not options.overwrite:
        raise FinetuneError(
            f"{out} is there already; give another --out, or --overwrite, which replaces it once the new result is whole"
        )


@contextlib.contextmanager
def only_run(options: FinetuneOptions) -> Iterator[None]:
    """Raise FinetuneError while another run, of any process, is in a block of the same `--out`; OSError where nothing can be kept there."""
    folder = state_folder(Path(options.out))
    descriptor = _locked(folder)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # a checkpoint is in it
            folder.rmdir()
        os.close(descriptor)


def _locked(folder: Path) -> int:
    """Return a descriptor of a directory that has its lock, made where it is not there. Raises FinetuneError and OSError."""
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
                f"another fine-tuning writes to {folder.with_suffix('')} at this moment; wait for it, or give another --out"
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
