"""Which way an operator runs, and what of its operands that takes resident."""

from pathlib import Path

import torch

from port_agent import budget
from port_agent.follow.budget import Budget
from port_agent.follow.operator_ways import OperatorWays
from port_agent.follow.parts.piecewise import PIECE_BYTES
from port_agent.follow.traits import traits_of

aten = torch.ops.aten
PIECE = PIECE_BYTES // 4
"""Numbers in a piece of an operand."""


def ways_of(bound: Budget) -> OperatorWays:
    follower = bound.follower
    return OperatorWays(follower.table, follower.residency, follower.room)


def test_what_takes_more_than_the_limit_is_in_pieces_and_needs_only_what_must_be_written(tmp_path: Path) -> None:
    with budget(tensors=4 * PIECE_BYTES, page_dir=tmp_path) as b:
        ways, add = ways_of(b), traits_of(aten.add.Tensor)
        for pieces_each in (1, 2):
            x, y = torch.ones(pieces_each * PIECE), torch.ones(pieces_each * PIECE)
            pieces, from_file = ways.in_parts(add, add.func, (x, y), {}, x.nbytes + y.nbytes)
            assert (pieces is not None) == (pieces_each == 2) and from_file is None
        away, here = (b.follower.table.of(tensor) for tensor in (x, y))
        assert away is not None and here is not None
        b.follower.residency.empty()
        b.follower.residency.bring([here])
        held, cut = ways.bring(add, [away, here], None, whole=False)
        assert held == [here] and not away.resident and cut is None
        held, _ = ways.bring(add, [away, here], None, whole=True)
        assert held == [away, here] and away.resident


def test_what_has_no_pieces_runs_whole_whatever_it_takes(tmp_path: Path) -> None:
    with budget(tensors=PIECE_BYTES, page_dir=tmp_path) as b:
        x = torch.ones(2 * PIECE)
        cumsum = traits_of(aten.cumsum.default)
        assert ways_of(b).in_parts(cumsum, cumsum.func, (x, 0), {}, x.nbytes) == (None, None)
