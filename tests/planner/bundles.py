"""Change members of a bundle, with hashes that fit again: what somebody who means harm would do."""

import hashlib
import itertools
import json
import random
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgpack

from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.codec import pack_integers, unpack_plan
from port_planner.ir.lowering.lower import lower


def members(path: Path) -> dict[str, bytes]:
    """Return the members of a bundle by name."""
    with zipfile.ZipFile(path) as archive:
        return {i.filename: archive.read(i) for i in archive.infolist()}


def assemble(path: Path, content: Mapping[str, bytes], *, rehash: bool = True) -> None:
    """Write a bundle from raw members; the manifest's hashes are made to fit."""
    content = dict(content)
    if rehash:
        manifest = json.loads(content["manifest.json"])
        for name in content.keys() & manifest["hashes"]:
            manifest["hashes"][name] = hashlib.sha256(_hashed(name, content[name])).hexdigest()
        content["manifest.json"] = json.dumps(manifest).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            kind = zipfile.ZIP_STORED if name.endswith(".safetensors") else zipfile.ZIP_DEFLATED
            archive.writestr(zipfile.ZipInfo(name), data, kind)


def _hashed(name: str, data: bytes) -> bytes:
    """Return the part of a member that its hash is of: all of it, or the header of a safetensors file."""
    if name.endswith(".safetensors") and len(data) >= 8:
        return data[: 8 + struct.unpack("<Q", data[:8])[0]]
    return data


def read_everything(bundle: Bundle) -> None:
    """Read every tensor and every row of a bundle; raise BundleError where one is damaged."""
    for key in bundle.tensors:
        for _ in bundle.contents(key, 1 << 20):
            pass
    with open(bundle.path, "rb") as stream:
        for key, column in bundle.data.items():
            for row in range(column.shape[0]):
                bundle.row(stream.fileno(), key, row)


def rewrite(source: Path, target: Path, changes: Mapping[str, Callable[[Any], Any]]) -> None:
    """Copy a bundle with some members changed: msgpack members and the manifest are given decoded."""
    content = members(source)
    for name, change in changes.items():
        if name.endswith(".msgpack"):
            content[name] = msgpack.packb(change(msgpack.unpackb(content[name])))
        else:
            content[name] = json.dumps(change(json.loads(content[name]))).encode()
    assemble(target, content)


def opened_plan(packed: Any) -> list[Any]:
    """A packed plan as lists that a test can change: decisions flat, order, sliced, figures, strategy."""
    plan = unpack_plan(packed)
    flat = [n for d in plan.decisions for n in (d.storage, d.after, d.before, int(d.action))]
    return [flat, list(plan.order), [n for pair in plan.sliced for n in pair], *packed[1:]]


def closed_plan(lists: list[Any]) -> list[Any]:
    """The packed form of such lists, whatever they say."""
    flat, order, sliced, figures, strategy = lists
    storages, after, before, actions = (flat[i::4] for i in range(4))
    columns = [
        _steps(storages),
        _steps(after),
        [b - a for a, b in zip(after, before, strict=False)],
        actions,
        _steps(order),
        sliced,
    ]
    numbers = [len(flat) // 4, len(order), *(n for column in columns for n in column)]
    return [pack_integers(numbers), figures, strategy]


def _steps(numbers: list[int]) -> list[int]:
    return [b - a for a, b in itertools.pairwise((0, *numbers))]


# -- changes at random


def _mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        i = rng.randrange(len(changed))
        match rng.randrange(4):
            case 0:
                changed[i] ^= 1 << rng.randrange(8)
            case 1:
                changed[i] = rng.randrange(256)
            case 2:
                del changed[i : i + rng.choice([1, 4, 100])]
            case _:
                changed[i:i] = rng.randbytes(rng.choice([1, 4, 100]))
    return bytes(changed)


_STRANGE: tuple[Any, ...] = (0, 1, -1, 2, 7, 255, 1 << 31, 1 << 62, 1 << 63, -(1 << 60), 0.5, float("nan"), float("inf"), "", "aten::add.Tensor",
           "x" * 5000, None, True, [], {}, [0] * 100, {"v": 0}, {"v": 10**7}, {"s": 3}, {"n": ["dtype", "float32"]}, b"\0")  # fmt: skip


def _mutate_tree(rng: random.Random, tree: Any) -> Any:
    """Change one random leaf or branch of nested lists and tables."""
    node = tree
    path: list[tuple[Any, Any]] = []
    while isinstance(node, list | dict) and node and (len(path) < 2 or rng.random() < 0.85):
        key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        path.append((node, key))
        node = node[key]
    if not path:
        return rng.choice(_STRANGE)
    parent, key = path[-1]
    match rng.randrange(5):
        case 0 | 1:
            parent[key] = rng.choice(_STRANGE)
        case 2 if isinstance(node, int) and not isinstance(node, bool):
            parent[key] = node + rng.choice([-1, 1, 8, -8, 1000])
        case 3:
            del parent[key]
        case _:
            if isinstance(parent, list):
                other = rng.randrange(len(parent))
                parent[key], parent[other] = parent[other], parent[key]
            else:
                parent[key] = rng.choice(_STRANGE)
    return tree


def write_mutated(rng: random.Random, content: Mapping[str, bytes], path: Path) -> None:
    """Write these members of a bundle with something changed at random, hashes mostly fitting again.

    Raises ValueError, TypeError, AttributeError or OverflowError for a change that cannot be written.
    """
    name = rng.choice(
        ["graphs.msgpack"] * 4 + ["plans.msgpack"] * 3 + ["costs.msgpack", "manifest.json", "tensors.safetensors"]
    )
    content = dict(content)
    match rng.randrange(6):
        case 0:
            assemble(path, content)
            path.write_bytes(_mutate_bytes(rng, path.read_bytes()))
        case 1:
            content[name] = _mutate_bytes(rng, content[name])
            assemble(path, content, rehash=name != "manifest.json")
        case _ if name == "manifest.json":
            content[name] = json.dumps(_mutate_tree(rng, json.loads(content[name])), default=str).encode()
            assemble(path, content, rehash=False)
        case _ if name.endswith(".safetensors"):
            content[name] = _mutate_bytes(rng, content[name][:2000]) + content[name][2000:]
            assemble(path, content)
        case _:
            tree = msgpack.unpackb(content[name])
            if name == "plans.msgpack":
                tree = [{k: opened_plan(p) for k, p in choice.items()} for choice in tree]
                tree = [{k: closed_plan(p) for k, p in choice.items()} for choice in _bounded(_mutate_tree(rng, tree))]
            else:
                tree = _bounded(_mutate_tree(rng, tree))
            content[name] = msgpack.packb(tree)
            assemble(path, content)


def _bounded(tree: Any) -> Any:
    """Bring integers into the range that msgpack can hold."""
    if isinstance(tree, dict):
        return {k: _bounded(v) for k, v in tree.items()}
    if isinstance(tree, list):
        return [_bounded(x) for x in tree]
    if isinstance(tree, int) and not isinstance(tree, bool):
        return max(-(1 << 63), min(tree, (1 << 64) - 1))
    return tree


def load(path: Path) -> Bundle:
    """Load a bundle as a worker does: every graph is lowered under every plan."""
    bundle = Bundle(path)
    for choice in bundle.plans:
        for name, plan in choice.items():
            lower(bundle.graphs[name], bundle.costs[name], plan)
    return bundle
