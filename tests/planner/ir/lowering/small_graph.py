"""A step of five operators whose memory and time can be worked out by hand."""

from port_planner.ir.costs import CostTable, DeviceCosts, Flash, OpCost
from port_planner.ir.graph import Op, Phase, Ref, Role, StepGraph, Storage, Value

X, W, A, B, LOSS = range(5)
SIZES = (40, 400, 400, 400, 40)


def graph() -> StepGraph:
    """Return a step: a from w and x, b from a, the loss from b, a again, then w is changed."""
    roles = (Role.BATCH, Role.PARAMETER, Role.TEMPORARY, Role.TEMPORARY, Role.TEMPORARY)
    names = ("x", "w", "", "", "")
    storages = tuple(map(Storage, SIZES, roles, names))
    values = tuple(Value(s, "float32", (size // 4,), (1,), 0) for s, size in enumerate(SIZES))
    ops = (
        Op("aten::mul.Tensor", (Ref(W), Ref(X)), (), (A,), (), Phase.FORWARD),
        Op("aten::relu", (Ref(A),), (), (B,), (), Phase.FORWARD),
        Op("aten::sum", (Ref(B),), (), (LOSS,), (), Phase.FORWARD),
        Op("aten::neg", (Ref(LOSS),), (), (None,), (), Phase.BACKWARD),
        Op("aten::add_.Tensor", (Ref(W), Ref(A)), (), (None,), (W,), Phase.UPDATE),
    )
    return StepGraph(storages, values, ops, (X,), LOSS)


def costs(*, base: int = 0, bytes_per_s: float = 400.0, workspace: int = 0) -> CostTable:
    """Return costs of a second an operator, two watts, and a card that moves a tensor in a second."""
    flash = Flash("card", bytes_per_s, bytes_per_s, 0.0, 0.001, 0.002)
    return CostTable(DeviceCosts("test", base, 2.0, 5.0, flash), (OpCost(1.0, workspace, 5.0),) * 5)
