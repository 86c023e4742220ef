"""Attributes of classes that are replaced for a while."""

from typing import Any


class ReplacedAttributes:
    """Replaces attributes of classes, and puts them back."""

    def __init__(self) -> None:
        self._own: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, replacement: Any) -> None:
        """Replace an attribute, also one that the class has from another."""
        self._own.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, replacement)

    def has_any_of(self, owner: Any) -> bool:
        """Return whether an attribute of a class is replaced."""
        return any(one is owner for one, _, _ in self._own)

    def put_back(self) -> None:
        """Restore all attributes, the last first."""
        for owner, name, own in reversed(self._own):
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)
        self._own.clear()
