"""The base that an adapter was trained on, recorded next to it: `merge` rejects different weights."""

from pathlib import Path

import msgspec

from port_agent.finetuning.inputs.model_files import fingerprints
from port_agent.finetuning.inputs.options import FinetuneError, FinetuneOptions
from port_agent.packing.quantized import Quantization
from port_agent.system.atomic_file import write_atomically

_NAME = "port_agent.json"


class BaseRecord(msgspec.Struct, frozen=True):
    """The base's model directory, the quantization of its linear layers, and `fingerprints` of the weights in its
    files.
    """

    model: str
    grid: Quantization | None
    files: dict[str, str]

    @classmethod
    def of(cls, options: FinetuneOptions) -> "BaseRecord":
        """Return the record of the base from which a fine-tuning begins. Raises FinetuneError and OSError."""
        return cls(options.model, options.base, fingerprints(Path(options.model)))

    @classmethod
    def read(cls, adapter: Path) -> "BaseRecord | None":
        """Return the record of the base that an adapter was trained on; None if it has none. Raises FinetuneError."""
        path = adapter / _NAME
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except FileNotFoundError:
            return None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
            raise FinetuneError(f"{path}, which records the base of the adapter, is damaged ({error})") from error

    def write(self, adapter: Path) -> None:
        """Write the record into an adapter's directory. Raises OSError."""
        write_atomically(adapter / _NAME, msgspec.json.format(msgspec.json.encode(self)))

    def check(self, folder: Path) -> None:
        """Raise FinetuneError, naming the file, if the weights of a directory are different; raises OSError."""
        found = fingerprints(folder)
        for name in sorted({*self.files, *found}):
            if found.get(name) == self.files.get(name):
                continue
            what = "is missing" if name not in found else "was added" if name not in self.files else "has changed"
            raise FinetuneError(
                f"{folder / name} {what} since the fine-tuning of {self.model} began; restore the original weights, or "
                "train again"
            )
