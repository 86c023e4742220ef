"""Change members of a bundle, with hashes that fit again: what somebody who means harm would do."""

import hashlib
import itertools
import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgpack

from planner.ir.bundle.codec import pack_integers, unpack_plan


def members(path: Path) -> dict[str, bytes]:
    """Return the members of a bundle by name."""
    with zipfile.ZipFile(path) as archive:
        return {i.filename: archive.read(i) for i in archive.infolist()}


def assemble(path: Path, content: Mapping[str, bytes], *, rehash: bool = True) -> None:
    """Write a bundle from raw members; the manifest's hashes are made to fit."""
    content = dict(content)
    if rehash:
        manifest = json.loads(content["manifest.json"])
        manifest["hashes"] = {n: hashlib.sha256(d).hexdigest() for n, d in content.items() if n in manifest["hashes"]}
        content["manifest.json"] = json.dumps(manifest).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            kind = zipfile.ZIP_STORED if name.endswith(".safetensors") else zipfile.ZIP_DEFLATED
            archive.writestr(zipfile.ZipInfo(name), data, kind)


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
        _steps(storages), _steps(after), [b - a for a, b in zip(after, before, strict=False)], actions, _steps(order), sliced
    ]  # fmt: skip
    numbers = [len(flat) // 4, len(order), *(n for column in columns for n in column)]
    return [pack_integers(numbers), figures, strategy]


def _steps(numbers: list[int]) -> list[int]:
    return [b - a for a, b in itertools.pairwise((0, *numbers))]
