"""The definition of a private part of torch, and the list of all of them."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

SEEN_IN = ("2.13", "2.14", "2.15")
"""The versions of torch that the product was tested with."""

_FAILURES = (AttributeError, ImportError, KeyError, RuntimeError, TypeError, ValueError)
"""Errors that show that a part is missing, or takes other arguments."""

_Used = TypeVar("_Used", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class PrivatePart:
    """An undocumented part of torch; `probe` raises if it is missing or behaves differently."""

    name: str
    reason: str
    breaks_without: str
    probe: Callable[[], object]
    seen_in: tuple[str, ...] = SEEN_IN

    def trouble(self) -> str:
        """Return why the installed torch lacks the part in its expected form; "" if it has it."""
        try:
            self.probe()
        except _FAILURES as error:
            return f"{type(error).__name__}: {error}"
        return ""


PARTS: list[PrivatePart] = []
"""The registered parts of this room's imported modules."""


def use_part(name: str, reason: str, breaks: str, probe: Callable[[], object] | None = None) -> None:
    """Register a private part; without a probe it only needs to exist under its name."""
    PARTS.append(PrivatePart(name, reason, breaks, probe or (lambda: find(name))))


def uses(name: str, breaks: str, probe: Callable[[], object] | None = None) -> Callable[[_Used], _Used]:
    """Register the private part that the decorated function uses; the reason is the first paragraph of
    the function's docstring.
    """

    def register(function: _Used) -> _Used:
        reason = " ".join((function.__doc__ or "").partition("\n\n")[0].split())
        use_part(name, reason, breaks, probe)
        return function

    return register


def find(name: str) -> Any:
    """Return the object with this dotted name, in which `()` calls.

    Raises ImportError or AttributeError if there is none.
    """
    module, _, rest = name.partition(".")
    found: Any = importlib.import_module(module)
    for part in rest.split("."):
        module, attribute = f"{module}.{part}", part.removesuffix("()")
        found = getattr(found, attribute) if hasattr(found, attribute) else importlib.import_module(module)
        found = found() if part.endswith("()") else found
    return found


def require(holds: object, otherwise: str) -> None:
    """Raise ValueError, for a probe, if a condition does not hold."""
    if not holds:
        raise ValueError(otherwise)
