"""A plan: what happens to each storage while it is idle. Decisions only.

A few hundred bytes.

A storage that is used at op `after` and next at a later op is idle in between. By default it stays in RAM. A decision
changes that for one idle gap:

- PAGE: written to a paging target after op `after` (unless one already holds the same contents), freed, and read back
  so that it is resident again before op `before` runs. For persistent storages the gap may wrap around the end of the
  step (`before <= after`): the storage then starts the step on flash.
- RECOMPUTE: freed after op `after`, rematerialized by running its writers again just before op `before`,
  and resident from then on.
- PACK: packed without loss in RAM after op `after`, in the codec and the room that the cost table has for it
  (`CostTable.packings`), and unpacked just before op `before`. Where nothing but ReLU's backward pass reads it any
  more, the signs of its items are kept and never unpacked: that pass runs on them.
- PACK_PAGE: packed as with PACK, the packed form then written to a paging target and freed, read back and unpacked just
  before op `before`. Signs are a 32nd of their tensor and stay in RAM.
- INTERMEDIATE: rematerialized just before op `before` only to rematerialize others there, then freed at once (`after`
  is the last use before; the storage may have no later use at all).

`before` may be earlier than the next use (a storage may return early to serve several rematerializations), never later.
Op indices count in `order` if there is one, else in the graph's own order.
"""

import enum
from dataclasses import dataclass

MIN_DECIDED_BYTES = 64 * 1024
"""Bytes below which storages are always kept: transfers below 1 MiB lose most of the bandwidth
and save too little memory.
"""


class Action(enum.IntEnum):
    """What happens to a storage in one idle gap. The numbers are part of the bundle format."""

    PAGE = 1
    RECOMPUTE = 2
    INTERMEDIATE = 3
    PACK = 4
    PACK_PAGE = 5


@dataclass(frozen=True, slots=True, order=True)
class Decision:
    """One idle gap of one storage, and what happens in it. See the module's docstring.

    `target`: which of `DeviceCosts.targets` a page or packed form goes to. All pages of a persistent storage go to the
    same one: 0, or the host's memory alongside a device with its own.
    """

    storage: int
    after: int
    before: int
    action: Action
    target: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule for one step graph.

    `order`: a permutation of the graph's ops, empty for the recorded order. `sliced`: (update group, number of
    slices) for elementwise update groups (see `port_planner.ir.lowering.update_slices.update_groups`) that run
    slice by slice, so that weight, gradient and optimizer state need not be resident whole. The figures are
    predictions by the verifier's replay.
    """

    decisions: tuple[Decision, ...] = ()
    order: tuple[int, ...] = ()
    sliced: tuple[tuple[int, int], ...] = ()
    ram_bytes: int = 0
    peak_bytes: int = 0
    seconds: float = 0.0
    joules: float = 0.0
    overhead_joules: float = 0.0
    bound_joules: float | None = None
    strategy: str = "keep-all"
