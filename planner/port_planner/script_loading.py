"""Load users' scripts: they find the modules that `python script.py` finds, and leave no files next to them.

A script's folder comes first on its import path. If a module there has the name of one that this project
uses (`http.py`, `rich/`), both are loaded. The script and its imports use theirs; this project and its
earlier imports keep their own.
"""

import builtins
import importlib.machinery
import pkgutil
import sys
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from port_planner.base.source_roots import PACKAGE_FOLDERS

_MAIN = "__mp_main__"
"""Python's own name for a script whose main part must not run: processes of `multiprocessing`
find the script by its file.
"""
_NOWHERE = "/dev/null/nowhere"
"""Stands on the import path instead of a script's folder while this project imports."""
_OUR_FILES = tuple(f"{folder}/" for folder in PACKAGE_FOLDERS)


class _Loader(importlib.machinery.SourceFileLoader):
    def set_data(self, path: str, data: object, *, _mode: int = 0o666) -> None:
        """Write no bytecode."""


def load_script(script: Path) -> types.ModuleType:
    """Run a script without its main part and return it. Raises what the script raises."""
    loader = _Loader(_MAIN, str(script.absolute()))
    module = types.ModuleType(_MAIN)
    module.__file__, module.__loader__ = loader.path, loader
    sys.modules["__main__"] = sys.modules[_MAIN] = module
    if not sys.flags.safe_path:
        put_first(str(script.resolve().parent))
    loader.exec_module(module)
    return module


@contextmanager
def imports_kept() -> Iterator[None]:
    """Let this process import as before once the context is left, whatever script was loaded in it."""
    path, imports = list(sys.path), builtins.__import__
    mains = {name: sys.modules.get(name) for name in ("__main__", _MAIN)}
    try:
        yield
    finally:
        sys.path[:] = path
        for name, module in mains.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
        while builtins.__import__ is not imports and isinstance(builtins.__import__, _Imports):
            builtins.__import__.undo()


def put_first(place: str) -> None:
    """Make modules of a folder or archive take precedence over all others, except for this project."""
    before = list(sys.path)
    sys.path.insert(0, place)
    rivals = _rivals(place, before)
    if rivals:
        builtins.__import__ = _Imports(place, rivals)


def _rivals(place: str, elsewhere: Sequence[str]) -> frozenset[str]:
    """Return the names that plain Python finds in `place`, but that mean another module in
    this process now or later.
    """
    found = {name for _, name, _ in pkgutil.iter_modules([place]) if _is_rival(name, place, elsewhere)}
    return frozenset(found - _loaded_at_start() if found else found)


def _is_rival(name: str, place: str, elsewhere: Sequence[str]) -> bool:
    theirs = _find(name, [place, *elsewhere])
    loaded = sys.modules.get(name)
    other = getattr(loaded, "__spec__", None) if loaded is not None else _find(name, elsewhere)
    return theirs is not None and other is not None and theirs.origin != other.origin


def _find(name: str, path: Sequence[str]) -> ModuleSpec | None:
    specs = (finder.find_spec(name, path if finder is PathFinder else None) for finder in sys.meta_path)
    return next((spec for spec in specs if spec is not None), None)


def _loaded_at_start() -> set[str]:
    """Return the modules that an interpreter loads at its start: a script gets these, whatever lies next to it."""
    import subprocess

    done = subprocess.run(
        [sys.executable, "-P", "-c", "import sys; print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


class _Imports:
    """Replaces `builtins.__import__` while some names mean one module to the script and another to this project."""

    def __init__(self, place: str, rivals: frozenset[str]) -> None:
        self._place, self._rivals = place, rivals
        self._import = builtins.__import__
        self._before = [vars(module) for name, module in sys.modules.items() if name not in ("__main__", _MAIN)]
        self._known = set(map(id, self._before))
        self._others: dict[str, dict[str, types.ModuleType]] = {}
        """Modules that are not in `sys.modules` now, for each name that the script has imported: ours, unless we
        import."""
        self._inside = dict.fromkeys(rivals, 0)
        """Number of our imports, in all threads, that have our module in `sys.modules` now."""
        self._lock = threading.Lock()
        self._thread = threading.local()

    def __call__(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> types.ModuleType:
        """Import a module as `builtins.__import__` does."""
        run = partial(self._import, name, globals, locals, fromlist or (), level)
        root = (name if level == 0 or globals is None else str(globals.get("__package__"))).partition(".")[0]
        if not getattr(self._thread, "ours", False) and not self._is_ours(globals):
            if root in self._rivals - self._others.keys():
                self._put_theirs_in_place(root)
            return run()
        outer, self._thread.ours = getattr(self._thread, "ours", False), True
        try:
            if root not in self._rivals:
                return run()
            with self._ours_in_place(root):
                return run()
        finally:
            self._thread.ours = outer

    def _is_ours(self, importer: Mapping[str, object] | None) -> bool:
        """Return whether a module was loaded before the script, or is one of our packages."""
        return importer is not None and (
            id(importer) in self._known or str(importer.get("__file__")).startswith(_OUR_FILES)
        )

    def _put_theirs_in_place(self, root: str) -> None:
        with self._lock:
            if root not in self._others:
                self._others[root] = {}
                if not self._inside[root]:
                    self._exchange(root)

    @contextmanager
    def _ours_in_place(self, root: str) -> Iterator[None]:
        """Make `root` mean our module within the context.

        Another thread of the script that imports it meanwhile gets ours, too: waiting could deadlock, because
        modules have their own locks.
        """
        self._count(root, 1)
        try:
            yield
        finally:
            self._count(root, -1)

    def _count(self, root: str, change: int) -> None:
        with self._lock:
            before, self._inside[root] = self._inside[root], self._inside[root] + change
            if before and self._inside[root]:
                return
            if root in self._others:
                self._exchange(root)
            inside = any(self._inside.values())
            old, new = (self._place, _NOWHERE) if inside else (_NOWHERE, self._place)
            if old in sys.path:
                sys.path[sys.path.index(old)] = new

    def _exchange(self, root: str) -> None:
        theirs = _take(root)
        sys.modules.update(self._others[root])
        self._others[root] = theirs

    def undo(self) -> None:
        """Let imports work as before."""
        builtins.__import__ = self._import
        for root in self._others:
            self._exchange(root)


def _take(root: str) -> dict[str, types.ModuleType]:
    """Return a loaded module and its submodules, and remove them from the loaded ones."""
    names = [name for name in sys.modules if name == root or name.startswith(f"{root}.")]
    return {name: sys.modules.pop(name) for name in names}
