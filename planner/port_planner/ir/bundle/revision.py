"""New plans for a bundle, in a file next to it; the bundle and its state stay unchanged."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.codec import pack_costs, pack_plan, unpack_costs, unpack_plan
from port_planner.ir.bundle.manifest import BundleError, PlanChoice
from port_planner.ir.costs import CostTable, Speeds
from port_planner.ir.plan import Plan

MAX_REVISION_BYTES = 64 << 20
"""Largest size in bytes; GPT-2's four plans and costs take 0.7 MB."""
_FORMAT = 1
_HASH_BYTES = 32


@dataclass(frozen=True, slots=True)
class Revision:
    """As many plans as the bundle has, for the same budgets, with the costs for which they were made."""

    bundle_id: str
    speeds: Speeds
    choices: tuple[PlanChoice, ...]
    plans: Sequence[Mapping[str, Plan]]
    costs: Mapping[str, CostTable]


class _Record(msgspec.Struct, array_like=True):
    format: int
    bundle_id: Annotated[str, msgspec.Meta(max_length=100)]
    speeds: Speeds
    choices: tuple[PlanChoice, ...]
    plans: list[dict[str, Any]]
    costs: dict[str, Any]


def revision_path(bundle: Path) -> Path:
    """Return the path of a bundle's revised plans."""
    return bundle.with_name(bundle.name + ".plans")


def write_revision(path: Path, revision: Revision) -> None:
    """Write a revision, completely or not at all. Raises OSError."""
    packed = msgspec.msgpack.encode(
        _Record(
            _FORMAT,
            revision.bundle_id,
            revision.speeds,
            revision.choices,
            [{name: pack_plan(plan) for name, plan in choice.items()} for choice in revision.plans],
            {name: pack_costs(table) for name, table in revision.costs.items()},
        )
    )
    temporary = path.with_name(path.name + ".new")
    with open(temporary, "wb") as stream:
        stream.write(hashlib.sha256(packed).digest() + packed)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


def read_revision(path: Path) -> Revision:
    """Return a revision. Raises BundleError if the file is damaged or not a revision, OSError if it cannot be read."""
    record = _read(path)
    plans = [{name: unpack_plan(plan) for name, plan in choice.items()} for choice in record.plans]
    costs = {name: unpack_costs(table) for name, table in record.costs.items()}
    return Revision(record.bundle_id, record.speeds, record.choices, plans, costs)


def read_revised_choices(path: Path) -> tuple[tuple[PlanChoice, ...], Speeds]:
    """Return the figures of a revision's plans and their measured speeds; cheap. Raises as `read_revision` does."""
    record = _read(path)
    return record.choices, record.speeds


def revised(bundle: Bundle, revision: Revision) -> Bundle:
    """Return a bundle with the plans and costs of its revision. Raises BundleError if it belongs to another bundle."""
    if revision.bundle_id != bundle.id or len(revision.plans) != len(bundle.plans):
        raise BundleError(f"{revision_path(bundle.path)} belongs to another bundle; delete it")
    return bundle.with_plans(revision.choices, revision.plans, revision.costs)


def _read(path: Path) -> _Record:
    if path.stat().st_size > MAX_REVISION_BYTES:
        raise BundleError(
            f"{path} has {path.stat().st_size} bytes; the maximum for revised plans is {MAX_REVISION_BYTES}"
        )
    content = path.read_bytes()
    packed = content[_HASH_BYTES:]
    if hashlib.sha256(packed).digest() != content[:_HASH_BYTES]:
        raise BundleError(f"{path} is damaged (SHA-256 differs); delete it: the bundle still has its own plans")
    try:
        record = msgspec.msgpack.decode(packed, type=_Record)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise BundleError(f"{path} holds no revised plans ({error}); delete it") from error
    if record.format != _FORMAT or len(record.choices) != len(record.plans):
        raise BundleError(f"{path} holds plans of format {record.format}, this version reads {_FORMAT}; delete it")
    return record
