"""What a resumed run keeps so that it has the same text: the date that chat templates insert, and the longest answer.
Stored next to the checkpoint.
"""

import datetime
from pathlib import Path

from port_agent.finetuning.inputs.options import FinetuneError
from port_agent.system.atomic_file import write_atomically

_NAME, _LENGTH_NAME = "date", "answer_tokens"


def state_folder(out: Path) -> Path:
    """Return the directory of a fine-tuning's checkpoint."""
    return out.with_name(f"{out.name}.state")


def date_of_run(out: Path) -> str:
    """Return the date of the run to resume, or today's if there is none. Raises FinetuneError."""
    path = state_folder(out) / _NAME
    try:
        return datetime.date.fromisoformat(path.read_text()).isoformat()
    except (FileNotFoundError, NotADirectoryError):
        return datetime.date.today().isoformat()
    except (OSError, ValueError) as error:
        raise FinetuneError(f"{path} is damaged ({error}); give the date of the run: --date YYYY-MM-DD") from error


def length_of_run(out: Path) -> int | None:
    """Return the longest answer in tokens of the run to resume; None if there is no such run. Raises FinetuneError."""
    path = state_folder(out) / _LENGTH_NAME
    try:
        return int(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return 0 if path.with_name(_NAME).is_file() else None  # older runs kept the date alone
    except (OSError, ValueError) as error:
        raise FinetuneError(f"{path} is damaged ({error}); give the length of the run: --seq-len N") from error


def keep_for_resuming(out: Path, date: str, answer_tokens: int) -> None:
    """Keep the date and the length of a run whose directory exists. Raises OSError."""
    write_atomically(state_folder(out) / _LENGTH_NAME, str(answer_tokens).encode())
    if date:
        write_atomically(state_folder(out) / _NAME, date.encode())


def forget_run(out: Path) -> None:
    """Remove the stored date and length."""
    for name in (_NAME, _LENGTH_NAME):
        (state_folder(out) / name).unlink(missing_ok=True)
