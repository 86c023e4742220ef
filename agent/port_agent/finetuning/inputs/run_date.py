"""The date that chat templates insert, kept beside a fine-tuning's checkpoint so that a run resumed on another day has
the same text.
"""

import datetime
from pathlib import Path

from port_agent.finetuning.inputs.options import FinetuneError
from port_agent.system.atomic_file import write_atomically

_NAME = "date"


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


def keep_date(out: Path, date: str) -> None:
    """Keep the date of a run whose directory exists. Raises OSError."""
    if date:
        write_atomically(state_folder(out) / _NAME, date.encode())


def forget_date(out: Path) -> None:
    """Remove the stored date."""
    (state_folder(out) / _NAME).unlink(missing_ok=True)
