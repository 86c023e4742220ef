"""Costs of operators from another machine of the same kind: of limited size, and used only after a
sample was verified here.
"""

import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec

from port_planner.base.errors import ExitCode, PortError
from port_planner.profiling.kept_costs import KeptCost, is_young

MAX_COSTS = 20_000
"""Largest number of operators; a machine that planned many models has some thousands."""
CHECKED = 5
"""Number of the costliest operators that are measured here and must agree before the others are used."""
_BELIEVED = 4.0
"""Factor by which the times of two machines of one kind may differ: cooling, clock and other work explain no more."""
_STRAYS = 1
"""Number of compared operators that may disagree, because their times include other work during a
measurement, here or there.
"""
_NOISE_S = 1e-4
_NOISE_BYTES = 1 << 20

_Seconds = Annotated[float, msgspec.Meta(ge=0, lt=3600)]
_Workspace = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
_Key = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{24}\\Z")]


class SharedCostsError(PortError):
    """Bytes that are not a table of operator costs."""

    exit_code = ExitCode.IMPOSSIBLE


class _Record(msgspec.Struct, array_like=True):
    seconds: _Seconds
    workspace_bytes: _Workspace
    measured_at: float


_DECODER = msgspec.msgpack.Decoder(Annotated[dict[_Key, _Record], msgspec.Meta(max_length=MAX_COSTS)])


def shared_name(context: str, board: str) -> str:
    """Return the name of a table: the hash of what costs depend on (`kept_costs.context`) and of the machine."""
    return hashlib.sha256(msgspec.json.encode([context, board])).hexdigest()


def pack_shared(costs: Mapping[str, KeptCost]) -> bytes:
    """Return costs as bytes: the newest, if there are more than a reader accepts."""
    newest = sorted(costs.items(), key=lambda item: -item[1].measured_at)[:MAX_COSTS]
    return msgspec.msgpack.encode(dict(newest))


def unpack_shared(content: bytes, now: float) -> dict[str, KeptCost]:
    """Return the costs that are recent enough; raises SharedCostsError for anything except packed costs."""
    try:
        records = _DECODER.decode(content)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise SharedCostsError(f"not a table of operator costs ({len(content)} bytes): {error}") from error
    if not all(math.isfinite(r.seconds) and math.isfinite(r.measured_at) for r in records.values()):
        raise SharedCostsError("costs of operators contain an invalid number")
    costs = {key: KeptCost(r.seconds, r.workspace_bytes, r.measured_at) for key, r in records.items()}
    return {key: cost for key, cost in costs.items() if is_young(cost, now)}


def to_check(costs: Mapping[str, KeptCost]) -> frozenset[str]:
    """Return the keys of the costs that must be measured here before the others are used."""
    return frozenset(sorted(costs, key=lambda key: -costs[key].seconds)[:CHECKED])


def disputed(pairs: Iterable[tuple[KeptCost, KeptCost]]) -> str:
    """Return how costs (reported, measured here) contradict each other; "" if only stray ones do."""
    apart = [found for found in itertools.starmap(_contradiction, pairs) if found]
    return apart[0] if len(apart) > _STRAYS else ""


def _contradiction(other: KeptCost, here: KeptCost) -> str:
    apart = abs(other.seconds - here.seconds) > _NOISE_S
    if apart and not here.seconds / _BELIEVED <= other.seconds <= here.seconds * _BELIEVED:
        return f"an operator is reported to take {other.seconds:.3g} s but takes {here.seconds:.3g} s here"
    if abs(other.workspace_bytes - here.workspace_bytes) > max(_NOISE_BYTES, here.workspace_bytes // 2):
        return f"an operator is reported to need {other.workspace_bytes} bytes of workspace but needs {here.workspace_bytes} here"
    return ""
