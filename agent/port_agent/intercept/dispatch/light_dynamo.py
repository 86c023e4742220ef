"""A torch._dynamo that is loaded when somebody compiles.

Every optimizer imports it, 70 MiB, only to call `graph_break()`.

Until then the module's place is held by one that answers what programs that compile nothing ask: `graph_break`, a no-op
outside of a compilation, what libraries decorate functions with (transformers does): `disable`, `allow_in_graph`,
`assume_constant_result`, and whether a model was compiled (accelerate asks when transformers saves one). Anything
else, a submodule included, loads the real one, and nothing of this is left but functions that ask it.
"""

import functools
import importlib.util
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

from port_agent.intercept.dispatch.deferred_modules import HeldModule, SubmoduleFinder, real_module
from port_planner.torch_compat.loading import (
    DYNAMO,
    STANDS_ALONE,
    bind_dynamo,
    forget_disabled,
    mark_disabled,
    unbind_dynamo,
)


def hold_place() -> None:
    """Put the light module in torch._dynamo's place, unless that is loaded already."""
    found = importlib.util.find_spec(DYNAMO) if DYNAMO not in sys.modules else None
    if found is None:
        return
    bind_dynamo(_LightDynamo(found))
    sys.meta_path.insert(0, SubmoduleFinder(DYNAMO, stand_alone=(STANDS_ALONE,)))


class _InstancesOfTheReal(type):
    """Of a class that stands for `OptimizedModule`: nothing is one until the real module is there."""

    def __instancecheck__(cls, instance: object) -> bool:
        module = sys.modules[DYNAMO]
        return not isinstance(module, _LightDynamo) and isinstance(instance, module.eval_frame.OptimizedModule)


class _OptimizedModule(metaclass=_InstancesOfTheReal):
    """What compiled models are instances of."""


class _LightEvalFrame:
    """Answers for the attribute torch._dynamo.eval_frame, which programs ask for one class."""

    OptimizedModule = _OptimizedModule

    def __getattr__(self, name: str) -> Any:
        return getattr(real_module(DYNAMO).eval_frame, name)


class _LightDynamo(HeldModule):
    """Answers for torch._dynamo until something is asked that only the real one can answer."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec)
        self._plain: list[Callable[..., Any]] = []
        self._marks: list[tuple[str, Any]] = []
        self.eval_frame = _LightEvalFrame()

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
            return real_module(DYNAMO).disable(fn, recursive, reason=reason, wrapping=wrapping)
        if not wrapping:  # torch._disable_dynamo, which asks again once the real module is there
            self._plain.append(fn)
            return fn
        return _disabled(fn, recursive, reason)

    def yield_to(self) -> types.ModuleType:
        """Load the real module into this one's place; it learns what this one was told."""
        unbind_dynamo()
        for function in self._plain:  # torch caches on a function what `disable` returned
            forget_disabled(function)
        module = super().yield_to()
        if STANDS_ALONE in sys.modules:  # where it was there first, the import system does not bind it in its package
            setattr(module, STANDS_ALONE.rpartition(".")[2], sys.modules[STANDS_ALONE])
        for mark, function in self._marks:
            getattr(module, mark)(function)
        return module


def _disabled(function: Callable[..., Any], recursive: bool, reason: str | None) -> Callable[..., Any]:
    """Return `function` with the attributes of one that torch._dynamo disabled."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        module = sys.modules[DYNAMO]
        if isinstance(module, _LightDynamo):
            return function(*args, **kwargs)
        return module.disable(function, recursive, reason=reason)(*args, **kwargs)

    mark_disabled(call, function, reason, recursive=recursive)
    return call
