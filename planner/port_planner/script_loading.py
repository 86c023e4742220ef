"""Scripts of the user's, loaded as modules: like `python script.py`, that leaves nothing beside them."""

import importlib.machinery
import importlib.util
from pathlib import Path


class _Loader(importlib.machinery.SourceFileLoader):
    def set_data(self, path: str, data: object, *, _mode: int = 0o666) -> None:
        """Keep no bytecode."""


def script_spec(name: str, script: Path) -> importlib.machinery.ModuleSpec | None:
    """Return what a module called `name` is made of `script` with; None unless that ends in .py."""
    if script.suffix != ".py":
        return None
    return importlib.util.spec_from_file_location(name, script, loader=_Loader(name, str(script)))
