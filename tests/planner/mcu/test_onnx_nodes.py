"""A node's attributes are taken one by one, and none is left."""

from __future__ import annotations

import pytest

from port_planner.mcu.ir import McuCompileError
from port_planner.mcu.onnx_nodes import OnnxNode

onnx = pytest.importorskip("onnx")


def node(**attributes: object) -> OnnxNode:
    return OnnxNode(onnx.helper.make_node("LeakyRelu", ["x"], ["y"], name="/body/act", **attributes))


def test_attributes_that_are_taken_skipped_or_as_expected_pass() -> None:
    read = node(alpha=0.5, mode="reflect", seed=3, axis=1)
    assert (read.take("alpha", 0.01), read.take("mode", "constant"), read.take("beta", 2.0)) == (0.5, "reflect", 2.0)
    read.skip("seed", "ratio")
    read.expect("axis", 1)
    read.expect("group", 1)
    read.refuse_unread()


def test_an_attribute_that_nobody_took_is_refused() -> None:
    read = node(alpha=0.5, gamma=1.0)
    read.take("alpha", 0.01)
    with pytest.raises(McuCompileError, match=r"^/body/act \(LeakyRelu\): attribute gamma is not known here"):
        read.refuse_unread()


def test_an_attribute_of_another_value_is_refused_with_both() -> None:
    with pytest.raises(McuCompileError, match=r"^/body/act \(LeakyRelu\): axis is 2; export it with axis 1"):
        node(axis=2).expect("axis", 1)


def test_a_node_without_a_name_is_named_by_what_it_gives() -> None:
    unnamed = OnnxNode(onnx.helper.make_node("Relu", ["x"], ["hidden"], domain="com.example"))
    assert (unnamed.place, unnamed.has_graph) == ("hidden (com.example.Relu)", False)
