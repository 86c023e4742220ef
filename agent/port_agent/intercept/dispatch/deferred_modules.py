"""Modules that libraries import but few programs use, loaded on first use.

`transformers`, `torch.distributed.tensor` and torch's kernels for the meta device, which `from_pretrained` uses, load
two large packages into every process. They are sympy (43 MiB, for the shapes of compiled programs) and scipy.optimize
(16 MiB, for the losses of object detectors). Until it is used, such a module is replaced by one with stand-ins for the
names that are imported from it. Anything else, including a submodule, loads the real one.
"""

import importlib
import importlib.util
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "torch.fx.experimental.symbolic_shapes": (
        "expect_true", "free_unbacked_symbols", "guard_or_false", "guard_or_true", "guard_size_oblivious", "guarding_hint_or_throw", "has_free_unbacked_symbols",
        "has_guarding_hint", "is_nested_int", "statically_known_true", "sym_and", "sym_eq", "sym_or",
    ),
    "scipy.optimize": ("linear_sum_assignment",),
    "sympy": (),
}  # fmt: skip
"""The deferred modules, and the functions that others import from them."""


def _is_bool(value: object) -> bool:
    return type(value) is bool


def _is_int(value: object) -> bool:
    return type(value) is int


def _is_shape(value: object) -> bool:
    return isinstance(value, tuple | list) and all(map(_is_int, value))


def _has_plain_shape(value: object) -> bool:
    shape, stride = getattr(value, "shape", None), getattr(value, "stride", None)
    return _is_shape(shape) and stride is not None and _is_shape(stride())


_OF_PLAIN_NUMBERS: Mapping[str, tuple[Callable[[object], bool], Callable[..., object]]] = {
    "expect_true": (_is_bool, bool),
    "free_unbacked_symbols": (_has_plain_shape, lambda tensor: frozenset()),
    "guard_or_false": (_is_bool, bool),
    "guard_or_true": (_is_bool, bool),
    "guard_size_oblivious": (_is_bool, bool),
    "is_nested_int": (_is_int, lambda number: False),
    "statically_known_true": (_is_bool, bool),
    "sym_and": (_is_bool, lambda *conditions: all(conditions)),
    "sym_eq": (_is_shape, lambda one, other: list(one) == list(other)),
    "sym_or": (_is_bool, lambda *conditions: any(conditions)),
}
"""Results of those functions for plain numbers, which are not symbols; kernels of the meta
device call them with sizes.
"""

TYPES: Mapping[str, Mapping[str, type]] = {
    "torch.fx.experimental.symbolic_shapes": {"GuardOnDataDependentSymNode": RuntimeError},
    "sympy": {"Basic": object},
}
"""Types that are imported, with their bases: exceptions to be caught, and classes for isinstance.

Only the real module creates instances, and by then these types are the real ones.
"""

_CONTENTS = frozenset(("__all__", "__version__"))
"""Names for which a placeholder loads the real module; names that the import system and inspect look up do not."""

_TAKES_ALL = re.compile(rb"^from \S+ import \*", re.MULTILINE)
"""Matches source code that imports every name of another module."""


def defer_modules() -> None:
    """Load the modules above only when they are used, except those that are loaded already."""
    waiting = {name for name in FUNCTIONS if name not in sys.modules}
    sys.meta_path.insert(0, _DeferringFinder(waiting))


@cache
def _may_have(file: str | None, folders: tuple[str, ...], name: str) -> bool:
    """Return whether a name occurs in the source of a module in `file`, or is a file in its `folders`.

    pickle asks every module for an object whose module is unknown, and fails if one of them loads others meanwhile.
    """
    if name in _CONTENTS or file is None:
        return True
    beside = [found for folder in folders for found in Path(folder).iterdir()]
    if any(found.name.partition(".")[0] == name for found in beside):
        return True
    own = Path(file).read_bytes()
    sources = [own]
    if _TAKES_ALL.search(own) is not None:
        sources += [found.read_bytes() for found in beside if found.suffix == ".py"]
    word = re.compile(rb"\b%s\b" % re.escape(name.encode()))
    return any(word.search(source) is not None for source in sources)


class HeldModule(types.ModuleType):
    """Placeholder for a module that is not loaded yet; its spec gives the place of the real
    one and of its submodules.
    """

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec.name)
        self.__spec__, self.__file__ = spec, spec.origin
        self.__path__ = list(spec.submodule_search_locations or ())

    def __getattr__(self, name: str) -> Any:
        if (name.startswith("__") and name not in _CONTENTS) or not _may_have(
            self.__file__, tuple(self.__path__), name
        ):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(real_module(self.__name__), name)

    def yield_to(self) -> types.ModuleType:
        """Load the real module into this one's place and return it."""
        del sys.modules[self.__name__]
        sys.meta_path[:] = [
            f for f in sys.meta_path if not (isinstance(f, SubmoduleFinder) and f.name == self.__name__)
        ]
        return importlib.import_module(self.__name__)


def real_module(name: str) -> types.ModuleType:
    """Load the real module if a placeholder stands for it, and return it."""
    present = sys.modules.get(name)
    return present.yield_to() if isinstance(present, HeldModule) else importlib.import_module(name)


class _DeferredModule(HeldModule):
    """A module of `FUNCTIONS`, with its stand-ins."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec)
        functions = {name: _calling(spec.name, name) for name in FUNCTIONS[spec.name]}
        types_ = {name: type(name, (base,), {}) for name, base in TYPES.get(spec.name, {}).items()}
        self._stand_ins: dict[str, Any] = {**functions, **types_}
        vars(self).update(self._stand_ins)

    def yield_to(self) -> types.ModuleType:
        module = super().yield_to()
        real = {name: getattr(module, name) for name in self._stand_ins}
        for other in [self, *(m for m in list(sys.modules.values()) if isinstance(m, types.ModuleType))]:
            taken = types.ModuleType.__getattribute__(other, "__dict__")  # a lazy module would load itself
            taken.update(
                {name: real[name] for name, stand_in in self._stand_ins.items() if taken.get(name) is stand_in}
            )
        return module


def _calling(module: str, name: str) -> Callable[..., Any]:
    """Return a function that loads the module if necessary, and then calls its function of that name."""
    is_plain, answer = _OF_PLAIN_NUMBERS.get(name, (None, None))

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_plain is not None and answer is not None and args and not kwargs and all(map(is_plain, args)):
            return answer(*args)
        return getattr(real_module(module), name)(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    return call


class _DeferringFinder(MetaPathFinder):
    """Finds the deferred modules."""

    def __init__(self, waiting: set[str]) -> None:
        self._waiting = waiting

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for a placeholder; None for other modules, and for one that is not installed."""
        if fullname not in self._waiting:
            return None
        self._waiting.discard(fullname)
        found = importlib.util.find_spec(fullname)
        if found is None:
            return None
        held = _DeferredModule(found)
        sys.meta_path.insert(0, SubmoduleFinder(fullname))
        return ModuleSpec(fullname, _There(held, found), origin=found.origin, is_package=bool(held.__path__))


class SubmoduleFinder(MetaPathFinder):
    """Loads the real module before the first of its submodules, except those that `stand_alone`."""

    def __init__(self, name: str, stand_alone: tuple[str, ...] = ()) -> None:
        self.name, self._stand_alone = name, stand_alone

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for the submodule as the real package loaded it, or None if it did not."""
        if not fullname.startswith(self.name + ".") or fullname in self._stand_alone:
            return None
        real_module(self.name)
        module = sys.modules.get(fullname)
        if module is None or module.__spec__ is None:
            return None
        return ModuleSpec(fullname, _There(module, module.__spec__), origin=module.__spec__.origin)


class _There(Loader):
    """A loader that returns a module that already exists."""

    def __init__(self, module: types.ModuleType, spec: ModuleSpec) -> None:
        self._module, self._spec = module, spec

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self._spec
