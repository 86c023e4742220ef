"""What an attack came to, as one line of a table."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttackOutcome:
    """`tried` attacks, of which `clean` did no harm; `harmed` describes the others.

    `notes` counts how the clean ones ended.
    """

    name: str
    tried: int
    clean: int
    harmed: tuple[str, ...] = ()
    notes: str = ""


Survived = Callable[[AttackOutcome], None]
"""The fixture `survived`: notes an attack for the table at the end of a run, and fails where it did harm."""
