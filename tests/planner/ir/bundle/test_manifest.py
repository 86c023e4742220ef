"""Manifests: the oldest format that can say what a bundle holds, and wrong ones, which are refused by name."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from port_planner.ir.allowed_operators import OPTIMIZERS
from port_planner.ir.bundle.bundle import read_manifest
from port_planner.ir.bundle.manifest import DEVICE_FORMAT, FORMAT, BundleError
from port_planner.ir.lowering.optimizer_scalars import SUPPORTED
from tests.agent.jobs_small import small_bundle
from tests.planner.bundles import assemble, load, members, rewrite


def test_a_bundle_says_for_which_device_it_is_and_only_then_older_agents_cannot_read_it(tmp_path: Path) -> None:
    def moved(graphs: Any) -> Any:
        return {k: [[[*s[:3], "cuda"] for s in g[0]], *g[1:]] for k, g in graphs.items()}

    assert json.loads(members(small_bundle())["manifest.json"])["format"] == FORMAT
    there = tmp_path / "there.port"
    manifest = replace(read_manifest(small_bundle()), device_kind="cuda")
    said = {"format": manifest.format, "device_kind": "cuda"}
    assert manifest.format == DEVICE_FORMAT != FORMAT
    rewrite(small_bundle(), there, {"graphs.msgpack": moved, "manifest.json": lambda m: {**m, **said}})
    assert load(there).manifest.device_kind == "cuda"
    torn = tmp_path / "torn.port"
    rewrite(small_bundle(), torn, {"graphs.msgpack": moved})
    with pytest.raises(BundleError, match="is for the device 'cuda', the manifest says 'cpu'"):
        load(torn)


def test_every_batch_of_the_known_updates_has_its_numbers(tmp_path: Path) -> None:
    def known(batches: int) -> Callable[[Any], Any]:
        return lambda manifest: {**manifest, "known": {"updates": 3, "shapes": [], "numbers": [[0.5]] * batches}}

    copy = tmp_path / "copy.port"
    rewrite(small_bundle(), copy, {"manifest.json": known(3)})
    assert read_manifest(copy).known_updates == 3
    rewrite(small_bundle(), copy, {"manifest.json": known(2)})
    with pytest.raises(BundleError, match="2 batches have numbers, of 3 updates"):
        read_manifest(copy)


def test_the_optimizers_of_bundles_are_those_of_the_planner() -> None:
    assert set(OPTIMIZERS) == set(SUPPORTED)


def _with_numbers(manifest: Any, numbers: list[Any], updates: int | None) -> Any:
    return {**manifest, "optimizer": {**manifest["optimizer"], "recorded": {"numbers": numbers, "updates": updates}}}


MANIFESTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "other format": lambda m: {**m, "format": 99},
    "no hashes": lambda m: {**m, "hashes": None},
    "no checksum of a tensor": lambda m: {
        **m,
        "hashes": {k: v for k, v in m["hashes"].items() if not k.endswith("7.weight")},
    },
    "more samples than there are": lambda m: {**m, "samples": m["samples"] + 1},
    "no layout": lambda m: {**m, "layouts": {k: v for k, v in m["layouts"].items() if not k.endswith("7.weight")}},
    "layout beyond its storage": lambda m: {
        **m,
        "layouts": {k: {**v, "offset": v["offset"] + 1} for k, v in m["layouts"].items()},
    },
    "no samples": lambda m: {**m, "samples": 0},
    "no held out samples": lambda m: {**m, "eval_samples": 0},
    "missing field": lambda m: {k: v for k, v in m.items() if k != "plans"},
    "batch size 0": lambda m: {**m, "batch_size": 0},
    "a million threads": lambda m: {**m, "threads": 10**6},
    "samples as text": lambda m: {**m, "samples": "many"},
    "plans as text": lambda m: {**m, "plans": "abc"},
    "fills as text": lambda m: {**m, "fills": {"state/x": "a"}},
    "layouts of nothing": lambda m: {**m, "layouts": {"parameter/x": {}}},
    "optimizer as text": lambda m: {**m, "optimizer": "AdamW"},
    "numbers of an optimizer as text": lambda m: {**m, "optimizer": {**m["optimizer"], "recorded": "numbers"}},
    "no numbers of an optimizer": lambda m: _with_numbers(m, [[]], 5),
    "numbers of an optimizer that are none": lambda m: _with_numbers(m, [0.5, ["0.5"]], None),
    "numbers of an optimizer for no update": lambda m: _with_numbers(m, [0.5], 0),
    "an own optimizer without groups": lambda m: {
        **m,
        "optimizer": {"name": "Lion", "recorded": {"numbers": [], "updates": None}},
    },
    "optimizer that does not exist": lambda m: {**m, "optimizer": {**m["optimizer"], "name": "__import__"}},
}


@pytest.mark.parametrize("what", MANIFESTS)
def test_hostile_manifests(what: str, tmp_path: Path) -> None:
    content = members(small_bundle())
    content["manifest.json"] = json.dumps(MANIFESTS[what](json.loads(content["manifest.json"]))).encode()
    assemble(tmp_path / "x.port", content, rehash=False)
    with pytest.raises(BundleError):
        load(tmp_path / "x.port")


def test_a_training_that_leaves_the_schedule_is_refused_with_the_epochs_that_it_takes() -> None:
    """Six batches an epoch, three to an update."""
    manifest = replace(read_manifest(small_bundle()), accumulate=3, schedule=(({"lr": 0.1},),) * 4)
    manifest.require_known(4)
    with pytest.raises(
        BundleError,
        match=r"for 4 updates, but this training takes it to 5: .* --epochs 3, or train no further than 12 steps",
    ):
        manifest.require_known(5)
    own = {**manifest.optimizer, "recorded": {"numbers": [1.0], "updates": 2}}
    assert (replace(manifest, optimizer=own).known_updates, replace(manifest, schedule=()).known_updates) == (2, None)
