"""A torch._dynamo that is loaded when somebody compiles.

Every optimizer imports it, 70 MiB, only to call `graph_break()`.

Until then the module's place is held by one that answers what programs that compile nothing ask: `graph_break`, a no-op
outside of a compilation, and what libraries decorate functions with (transformers does): `disable`, `allow_in_graph`,
`assume_constant_result`. Anything
else, a submodule included, loads the real one, and nothing of this is left but functions that ask it.
"""

import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from torch._C._dynamo import eval_frame as _eval_frame

_NAME = "torch._dynamo"
_STANDS_ALONE = f"{_NAME}._trace_wrapped_higher_order_op"
"""A submodule that needs nothing of its package; transformers imports it for its attention masks."""
_CACHED_ON_FUNCTION = "__dynamo_disable"
"""Where torch._disable_dynamo keeps what `disable` returned (torch/_compile.py)."""


def never_compile(function: Callable[..., Any]) -> None:
    """Keep a function, and what it calls, out of torch.compile.

    As torch._dynamo.disable, without loading that.

    Its wrapper would cost two calls each time; the mark on the code costs nothing (torch 2.13, private).
    """
    skip = _eval_frame._FrameAction.SKIP
    _eval_frame.set_code_exec_strategy(function.__code__, _eval_frame._FrameExecStrategy(skip, skip))


def hold_place() -> None:
    """Put the light module in torch._dynamo's place, unless that is loaded already."""
    found = importlib.util.find_spec(_NAME) if _NAME not in sys.modules else None
    if found is None:
        return
    light = _LightDynamo(found)
    sys.modules[_NAME] = light
    torch._dynamo = light
    sys.meta_path.insert(0, _SubmoduleFinder(light))


class _LightDynamo(types.ModuleType):
    """Answers for torch._dynamo until something is asked that only the real one can answer."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(_NAME)
        self.__spec__, self.__file__ = spec, spec.origin
        self.__path__ = list(spec.submodule_search_locations or ())
        self._plain: list[Callable[..., Any]] = []
        self._marks: list[tuple[str, Any]] = []

    def graph_break(self, msg: str = "") -> None:
        """Do nothing, as outside of a compilation."""

    def assume_constant_result(self, fn: Any) -> Any:
        """Return `fn`, which the real module will mark once it is there."""
        self._marks.append(("assume_constant_result", fn))
        return fn

    def allow_in_graph(self, fn: Any) -> Any:
        """Return `fn`, which the real module will mark once it is there."""
        self._marks.append(("allow_in_graph", fn))
        return fn

    def disable(
        self, fn: Any = None, recursive: bool = True, *, reason: str | None = None, wrapping: bool = True
    ) -> Any:
        """Return a function that calls `fn`, through the real module's `disable` once that is there."""
        if fn is None:
            return functools.partial(self.disable, recursive=recursive, reason=reason, wrapping=wrapping)
        if not isinstance(fn, types.FunctionType):  # classes and modules, each in a way of its own
            return load().disable(fn, recursive, reason=reason, wrapping=wrapping)
        if not wrapping:  # torch._disable_dynamo, which asks again once the real module is there
            self._plain.append(fn)
            return fn
        return _disabled(fn, recursive, reason)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what the import system and inspect look for and a plain module may lack
            raise AttributeError(f"module {_NAME!r} has no attribute {name!r}")
        return getattr(load(), name)

    def give_way(self) -> types.ModuleType:
        """Load the real module into this one's place; it learns what this one was told."""
        del sys.modules[_NAME], torch._dynamo
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _SubmoduleFinder)]
        for function in self._plain:  # torch caches on a function what `disable` returned
            if getattr(function, _CACHED_ON_FUNCTION, None) is function:
                delattr(function, _CACHED_ON_FUNCTION)
        module = importlib.import_module(_NAME)
        if _STANDS_ALONE in sys.modules:  # where it was there first, the import system does not bind it in its package
            setattr(module, _STANDS_ALONE.rpartition(".")[2], sys.modules[_STANDS_ALONE])
        for mark, function in self._marks:
            getattr(module, mark)(function)
        return module


def _disabled(function: Callable[..., Any], recursive: bool, reason: str | None) -> Callable[..., Any]:
    """Return `function` with the attributes of one that torch._dynamo disabled.

    See torch/_dynamo/eval_frame.py.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        module = sys.modules[_NAME]
        if isinstance(module, _LightDynamo):
            return function(*args, **kwargs)
        return module.disable(function, recursive, reason=reason)(*args, **kwargs)

    vars(call).update(
        _torchdynamo_disable=True,
        _torchdynamo_disable_msg=reason,
        _torchdynamo_disable_recursive=recursive,
        _torchdynamo_orig_callable=function,
        _torchdynamo_wrapper_id=id(call),
    )
    return call


def load() -> types.ModuleType:
    """Load the real torch._dynamo into its place and return it."""
    present = sys.modules.get(_NAME)
    return present.give_way() if isinstance(present, _LightDynamo) else importlib.import_module(_NAME)


class _SubmoduleFinder(MetaPathFinder):
    """Loads the real torch._dynamo before the first of its submodules."""

    def __init__(self, light: _LightDynamo) -> None:
        self._prefix = light.__name__ + "."

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec that gives the submodule as the real package loaded it, or None where it did not."""
        if not fullname.startswith(self._prefix) or fullname == _STANDS_ALONE:
            return None
        load()
        module = sys.modules.get(fullname)
        if module is None or module.__spec__ is None:
            return None
        return ModuleSpec(fullname, _Loaded(module, module.__spec__), origin=module.__spec__.origin)


class _Loaded(Loader):
    """Gives a module that was loaded meanwhile."""

    def __init__(self, module: types.ModuleType, spec: ModuleSpec) -> None:
        self._module, self._spec = module, spec

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self._spec
