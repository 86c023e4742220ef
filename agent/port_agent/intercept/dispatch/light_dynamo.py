"""A light torch._dynamo, replaced by the real one (70 MiB) when something is compiled.

Every optimizer imports it only to call `graph_break()`. Until the real one is needed, a placeholder provides what
programs without compilation use. This is `graph_break`, which does nothing outside a compilation, and the decorators
`disable`, `allow_in_graph` and `assume_constant_result`, which transformers uses. It also answers whether a model was
compiled, which accelerate asks when transformers saves one. Anything else, including a submodule, loads the real one;
after that, the placeholder's functions call it.
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
    """Put the light module in torch._dynamo's place, unless the real one is already loaded."""
    found = importlib.util.find_spec(DYNAMO) if DYNAMO not in sys.modules else None
    if found is None:
        return
    bind_dynamo(_LightDynamo(found))
    sys.meta_path.insert(0, SubmoduleFinder(DYNAMO, stand_alone=(STANDS_ALONE,)))


class _InstancesOfTheReal(type):
    """Metaclass of the stand-in for `OptimizedModule`: it has no instances until the real module is loaded."""

    def __instancecheck__(cls, instance: object) -> bool:
        module = sys.modules[DYNAMO]
        return not isinstance(module, _LightDynamo) and isinstance(instance, module.eval_frame.OptimizedModule)


class _OptimizedModule(metaclass=_InstancesOfTheReal):
    """Stand-in for the class of compiled models."""


class _LightEvalFrame:
    """Stand-in for torch._dynamo.eval_frame, of which programs use one class."""

    OptimizedModule = _OptimizedModule

    def __getattr__(self, name: str) -> Any:
        return getattr(real_module(DYNAMO).eval_frame, name)


class _LightDynamo(HeldModule):
    """Stand-in for torch._dynamo until the real one is needed."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec)
        self._plain: list[Callable[..., Any]] = []
        self._marks: list[tuple[str, Any]] = []
        self.eval_frame = _LightEvalFrame()

    def graph_break(self, msg: str = "") -> None:
        """Do nothing, as outside a compilation."""

    def assume_constant_result(self, fn: Any) -> Any:
        """Return `fn`, which the real module will mark once it is loaded."""
        self._marks.append(("assume_constant_result", fn))
        return fn

    def allow_in_graph(self, fn: Any) -> Any:
        """Return `fn`, which the real module will mark once it is loaded."""
        self._marks.append(("allow_in_graph", fn))
        return fn

    def disable(
        self, fn: Any = None, recursive: bool = True, *, reason: str | None = None, wrapping: bool = True
    ) -> Any:
        """Return a function that calls `fn`, through the real module's `disable` once that is loaded."""
        if fn is None:
            return functools.partial(self.disable, recursive=recursive, reason=reason, wrapping=wrapping)
        if not isinstance(fn, types.FunctionType):  # classes and modules are handled differently
            return real_module(DYNAMO).disable(fn, recursive, reason=reason, wrapping=wrapping)
        if not wrapping:  # torch._disable_dynamo asks again once the real module is loaded
            self._plain.append(fn)
            return fn
        return _disabled(fn, recursive, reason)

    def yield_to(self) -> types.ModuleType:
        """Load the real module into this one's place, with the marks that were recorded here."""
        unbind_dynamo()
        for function in self._plain:  # torch caches on a function what `disable` returned
            forget_disabled(function)
        module = super().yield_to()
        if STANDS_ALONE in sys.modules:  # the import system does not bind it in its package if it was loaded first
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
