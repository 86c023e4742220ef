"""What an adapter was trained over, written beside it: `merge` refuses weights that are others."""

from pathlib import Path

import msgspec

from port_agent.finetuning.inputs.model_files import fingerprints
from port_agent.finetuning.inputs.options import FinetuneError, FinetuneOptions
from port_agent.packing.quantized import Quantization
from port_agent.system.atomic_file import write_atomically

_NAME = "port_agent.json"


class BaseRecord(msgspec.Struct, frozen=True):
    """The model directory, the grid that its linear layers lay on, and which weights its files had (`fingerprints`)."""

    model: str
    grid: Quantization | None
    files: dict[str, str]

    @classmethod
    def of(cls, options: FinetuneOptions) -> "BaseRecord":
        """Return what a fine-tuning begins with. Raises FinetuneError and OSError."""
        return cls(options.model, options.base, fingerprints(Path(options.model)))

    @classmethod
    def read(cls, adapter: Path) -> "BaseRecord | None":
        """Return what an adapter was trained over; None where it does not say. Raises FinetuneError."""
        path = adapter / _NAME
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except FileNotFoundError:
            return None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
            raise FinetuneError(
                f"{path}, which says what the adapter was trained over, is damaged ({error})"
            ) from error

    def write(self, adapter: Path) -> None:
        """Write it into an adapter's directory. Raises OSError."""
        write_atomically(adapter / _NAME, msgspec.json.format(msgspec.json.encode(self)))

    def check(self, folder: Path) -> None:
        """Raise FinetuneError by name where the weights of a directory are not those, and OSError."""
        found = fingerprints(folder)
        for name in sorted({*self.files, *found}):
            if found.get(name) == self.files.get(name):
                continue
            what = "is not there" if name not in found else "was not there" if name not in self.files else "has changed"
            raise FinetuneError(
                f"{folder / name} {what} since the fine-tuning over {self.model} began; give it the weights that it began with, or "
                "train anew"
            )
