"""One node of an ONNX file; attributes that are not read are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

from port_planner.mcu.ir import McuCompileError

if TYPE_CHECKING:
    import onnx

Value = TypeVar("Value")
OTHER_OPERATORS = "use operators that have one: port-agent's docs/boards.md lists them"


class OnnxNode:
    """A node whose attributes are taken one by one; remaining attributes are refused (`refuse_unread`)."""

    def __init__(self, node: onnx.NodeProto) -> None:
        from onnx.helper import get_attribute_value

        self.kind: str = node.op_type
        self.domain: str = "" if node.domain == "ai.onnx" else node.domain
        self.inputs: tuple[str, ...] = tuple(node.input)
        self.outputs: tuple[str, ...] = tuple(name for name in node.output if name)
        self.name: str = node.name or node.output[0]
        self.has_graph: bool = any(each.HasField("g") or each.graphs for each in node.attribute)
        self._unread: dict[str, Any] = {each.name: get_attribute_value(each) for each in node.attribute}

    @property
    def place(self) -> str:
        """The node in the terms of the file: its name and its operator."""
        return f"{self.name} ({self.domain}.{self.kind})" if self.domain else f"{self.name} ({self.kind})"

    def refusal(self, problem: str, remedy: str = OTHER_OPERATORS) -> McuCompileError:
        """Return the error that refuses this node."""
        return McuCompileError(self.place, problem, remedy)

    def take(self, name: str, default: Value) -> Value:
        """Return an attribute, text as str, or the default if the node does not have it."""
        found: Any = self._unread.pop(name, default)
        text: Any = found.decode() if isinstance(found, bytes) else found
        return cast(Value, text)

    def skip(self, *names: str) -> None:
        """Skip attributes that change nothing here, or that the comparison with the reference covers."""
        for name in names:
            self._unread.pop(name, None)

    def expect(self, name: str, value: object) -> None:
        """Raise McuCompileError unless an attribute has this value, its default."""
        found: object = self.take(name, value)
        if found != value:
            raise self.refusal(f"{name} is {found}", f"export it with {name} {value}")

    def refuse_unread(self) -> None:
        """Raise McuCompileError if an attribute was not read."""
        if self._unread:
            raise self.refusal(f"attribute {', '.join(sorted(self._unread))} is not known here")


__all__ = ["OTHER_OPERATORS", "OnnxNode"]
