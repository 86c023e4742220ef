"""Bundles from strangers: whatever is in the file, the loader gives a job that holds or an error with its reason."""

import json
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch

from planner.ir.bundle.bundle import DEVICE_FORMAT, FORMAT, OPTIMIZERS, Bundle, BundleError, read_manifest
from planner.ir.bundle.checksums import rows_per_block
from planner.ir.bundle.codec import WireError, pack_integers, pack_plan, unpack_plan
from planner.ir.errors import PortError
from planner.ir.graph import GraphError
from planner.ir.lowering.lower import lower
from planner.ir.lowering.optimizer_scalars import SUPPORTED
from planner.ir.operators import OperatorError
from planner.ir.plan import Action
from planner.ir.program import BudgetError, PlanError
from tests.agent.jobs_small import make_job, small_bundle, write_job
from tests.planner.bundles import assemble, closed_plan, members, opened_plan, read_everything, rewrite, write_mutated


def load(path: Path) -> Bundle:
    """Load a bundle as a worker does: every graph is lowered under every plan."""
    bundle = Bundle(path)
    for choice in bundle.plans:
        for name, plan in choice.items():
            lower(bundle.graphs[name], bundle.costs[name], plan)
    return bundle


def test_a_good_bundle_loads_and_hashes_fit(tmp_path: Path) -> None:
    bundle = load(small_bundle())
    read_everything(bundle)
    assert read_manifest(small_bundle()) == bundle.manifest
    copy = tmp_path / "copy.port"
    rewrite(small_bundle(), copy, {})
    assert load(copy).graphs == bundle.graphs
    for choice in bundle.plans:
        for plan in choice.values():
            assert unpack_plan(msgpack.unpackb(msgpack.packb(pack_plan(plan)))) == plan


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


def test_an_update_of_all_micro_batches_takes_their_columns_and_gives_their_losses(tmp_path: Path) -> None:
    def merged(graphs: Any) -> Any:
        first = graphs["first"]
        return {**graphs, "update": [*first[:3], first[3] * 2, first[4], [first[4]], *first[6:]]}

    def with_update(members_of: Any) -> Any:
        return {**members_of, "update": members_of["first"]}

    changes: dict[str, Any] = {
        "graphs.msgpack": merged, "costs.msgpack": with_update,
        "plans.msgpack": lambda plans: [with_update(plan) for plan in plans],
        "manifest.json": lambda m: {**m, "format": DEVICE_FORMAT, "graphs": [*m["graphs"], "update"]},
    }  # fmt: skip
    whole = tmp_path / "whole.port"
    rewrite(small_bundle(2), whole, changes)
    manifest = load(whole).manifest
    assert manifest.main_graph == "update" and manifest.batches_of("update") == 2 and manifest.batches_of("last") == 1
    assert manifest.format == DEVICE_FORMAT
    short = {
        **changes,
        "graphs.msgpack": lambda g: {**g, "update": [*g["first"][:5], [g["first"][4]], *g["first"][6:]]},
    }
    rewrite(small_bundle(2), whole, short)
    with pytest.raises(BundleError, match="graph update takes 2 columns of data, there are 2"):
        load(whole)
    fewer = {
        **changes,
        "graphs.msgpack": lambda g: {
            **g,
            "update": [*g["first"][:3], g["first"][3] * 2, g["first"][4], [], *g["first"][6:]],
        },
    }
    rewrite(small_bundle(2), whole, fewer)
    with pytest.raises(BundleError, match="losses for 2 batches"):
        load(whole)


# -- hostile on purpose


def test_the_optimizers_of_bundles_are_those_of_the_planner() -> None:
    assert set(OPTIMIZERS) == set(SUPPORTED)


def _first_op(graphs: Any) -> list[Any]:
    graph = next(iter(graphs.values()))
    op: list[Any] = graph[2][0]
    return op


def _set(graphs: Any, *path: Any, value: Any) -> Any:
    target = next(iter(graphs.values()))
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return graphs


def _unknown_op(graphs: Any) -> Any:
    _first_op(graphs)[0] = "os::system"
    return graphs


def _file_op(graphs: Any) -> Any:
    _first_op(graphs)[0] = "aten::from_file"
    return graphs


def _cycle(graphs: Any) -> Any:
    graph = next(iter(graphs.values()))
    graph[2].reverse()
    return graphs


def _nested(graphs: Any) -> Any:
    deep: Any = 1
    for _ in range(30):
        deep = [deep]
    _first_op(graphs)[1] = [deep]
    return graphs


GRAPHS: dict[str, tuple[Callable[[Any], Any], type[PortError]]] = {
    "unknown operator": (_unknown_op, OperatorError),
    "operator that opens files": (_file_op, OperatorError),
    "cycle": (_cycle, GraphError),
    "nested arguments": (_nested, WireError),
    "negative size": (lambda g: _set(g, 0, 0, 0, value=-1), WireError),
    "absurd size": (lambda g: _set(g, 0, 0, 0, value=1 << 60), GraphError),
    "absurd shape": (lambda g: _set(g, 1, 0, 2, value=[1 << 40] * 8), GraphError),
    "negative shape": (lambda g: _set(g, 1, 0, 2, value=[-4]), WireError),
    "view outside of its storage": (lambda g: _set(g, 1, 0, 4, value=1 << 30), GraphError),
    "storage that does not exist": (lambda g: _set(g, 1, 0, 0, value=10**6), GraphError),
    "unknown dtype": (lambda g: _set(g, 1, 0, 1, value="object"), GraphError),
    "loss that does not exist": (lambda g: _set(g, 4, value=10**6), GraphError),
    "number as text": (lambda g: _set(g, 4, value="0"), WireError),
    "role that does not exist": (lambda g: _set(g, 0, 0, 1, value=77), WireError),
    "graph that is a number": (lambda g: dict.fromkeys(g, 5), WireError),
    "not a table": (lambda g: [1, 2], BundleError),
    "another name": (lambda g: {k + "x": v for k, v in g.items()}, BundleError),
    "no graph": (lambda g: {}, BundleError),
}


@pytest.mark.parametrize("what", GRAPHS)
def test_hostile_graphs(what: str, tmp_path: Path) -> None:
    change, error = GRAPHS[what]
    rewrite(small_bundle(), tmp_path / "x.port", {"graphs.msgpack": change})
    with pytest.raises(error) as caught:
        load(tmp_path / "x.port")
    assert caught.value.exit_code == 2 and len(str(caught.value)) < 2000


def _plans(change: Callable[[list[Any]], None]) -> Callable[[Any], Any]:
    def apply(choices: Any) -> Any:
        for choice in choices:
            for name, packed in choice.items():
                plan = opened_plan(packed)
                change(plan)
                choice[name] = closed_plan(plan)
        return choices

    return apply


def _packed(decisions: Any) -> Callable[[Any], Any]:
    return lambda choices: [{name: [decisions, *plan[1:]] for name, plan in c.items()} for c in choices]


PLANS: dict[str, tuple[Callable[[Any], Any], type[PortError]]] = {
    "reads of freed tensors": (_plans(lambda p: p[0].extend([3, 0, 1, int(Action.RECOMPUTE)])), PlanError),
    "over its budget": (_plans(lambda p: p[3].__setitem__(0, 10)), BudgetError),
    "order that is no permutation": (_plans(lambda p: p[1].extend([0, 0])), WireError),
    "order of a few ops": (_plans(lambda p: p.__setitem__(1, [1, 0])), PlanError),
    "order of too many ops": (_plans(lambda p: p.__setitem__(1, list(range(9999)))), PlanError),
    "slices of what does not exist": (_plans(lambda p: p.__setitem__(2, [999, 4])), PlanError),
    "decisions that are cut off": (_packed(pack_integers([9, 0, 1, 1])), WireError),
    "a claim of more decisions than memory": (_packed(pack_integers([1 << 60, 0])), WireError),
    "integers that go on and on": (_packed(zlib.compress(b"\xff" * 100)), WireError),
    "integers that unpack to gigabytes": (_packed(zlib.compress(bytes(64 << 20))), WireError),
    "integers that are no data": (_packed(b"abc"), WireError),
    "integers as text": (_packed("abc"), WireError),
    "action that does not exist": (_plans(lambda p: p[0].extend([0, 0, 1, 9])), WireError),
    "infinite seconds": (_plans(lambda p: p[3].__setitem__(2, float("inf"))), WireError),
    "NaN": (_plans(lambda p: p[3].__setitem__(2, float("nan"))), WireError),
    "no plans": (lambda c: [], BundleError),
    "plans that are a number": (lambda c: 5, PortError),
    "another graph's": (lambda c: [{"x": next(iter(choice.values()))} for choice in c], BundleError),
}


@pytest.mark.parametrize("what", PLANS)
def test_hostile_plans(what: str, tmp_path: Path) -> None:
    change, error = PLANS[what]
    rewrite(small_bundle(), tmp_path / "x.port", {"plans.msgpack": change})
    with pytest.raises(error):
        load(tmp_path / "x.port")


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


def test_members_that_nobody_asked_for_do_nothing(tmp_path: Path) -> None:
    """A pickle and names that climb out of the directory are never opened or unpacked."""
    content = members(small_bundle())
    marker = tmp_path / "owned"
    content["graphs.pkl"] = f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()
    content["../../escaped"] = b"x"
    content["/tmp/port-absolute"] = b"x"
    before = set(tmp_path.parent.rglob("*"))
    path = tmp_path / "x.port"
    assemble(path, content)
    read_everything(load(path))
    assert not marker.exists() and not Path("/tmp/port-absolute").exists()
    assert set(tmp_path.parent.rglob("*")) - before <= {path}


def test_pickle_in_place_of_a_graph(tmp_path: Path) -> None:
    content = members(small_bundle())
    marker = tmp_path / "owned"
    content["graphs.msgpack"] = f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()
    assemble(tmp_path / "x.port", content)
    with pytest.raises(PortError):
        load(tmp_path / "x.port")
    assert not marker.exists()


def test_compressed_or_short_or_overlong_tensors(tmp_path: Path) -> None:
    content = members(small_bundle())
    path = tmp_path / "x.port"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    with pytest.raises(BundleError, match="compressed"):
        load(path)
    for header in (
        struct.pack("<Q", 1 << 62),
        struct.pack("<Q", 10) + b"not json!!",
        b"abc",
        struct.pack("<Q", 2) + b"[]",
    ):
        assemble(path, {**content, "tensors.safetensors": header})
        with pytest.raises(BundleError):
            load(path)
    for entry in ('{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 99999999]}}', '{"a": 5}',
                  '{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', "[" * 100_000):  # fmt: skip
        data = entry.encode()
        assemble(path, {**content, "tensors.safetensors": struct.pack("<Q", len(data)) + data})
        with pytest.raises(BundleError):
            load(path)


def test_a_zip_bomb(tmp_path: Path) -> None:
    content = members(small_bundle())
    content["graphs.msgpack"] = b"\0" * (80 << 20)
    assemble(tmp_path / "x.port", content)
    with pytest.raises(BundleError, match="limit"):
        load(tmp_path / "x.port")


@pytest.mark.parametrize("keep", [0, 1, 100, 0.3, 0.9, -1])
def test_truncated_files(keep: float, tmp_path: Path) -> None:
    data = small_bundle().read_bytes()
    path = tmp_path / "x.port"
    path.write_bytes(data[: int(keep * len(data))] if 0 < keep < 1 else data[: int(keep)])
    with pytest.raises(BundleError):
        load(path)


def _flipped(path: Path, place: int, bit: int = 0) -> Bundle:
    """Return the small bundle with one bit flipped at byte `place`."""
    data = bytearray(small_bundle().read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)
    return Bundle(path)


def test_a_flipped_bit_is_found_where_it_is_read_and_named(tmp_path: Path) -> None:
    good = Bundle(small_bundle())
    weight, column = good.tensors["parameter/7.weight"], good.data["train/0"]
    bad = _flipped(tmp_path / "weight.port", weight.offset + weight.nbytes // 2)
    with pytest.raises(BundleError, match=r"tensor parameter/7\.weight is damaged"):
        list(bad.contents("parameter/7.weight", 1 << 20))
    assert b"".join(bad.contents("parameter/7.bias", 7)) == b"".join(good.contents("parameter/7.bias", 1 << 20))
    row_bytes = column.nbytes // column.shape[0]
    bad = _flipped(tmp_path / "row.port", column.offset + 10 * row_bytes)
    with open(bad.path, "rb") as stream:
        damaged = []
        for row in range(column.shape[0]):
            try:
                assert bad.row(stream.fileno(), "train/0", row) == good.row(stream.fileno(), "train/0", row)
            except BundleError as error:
                assert "train/0 is damaged near row" in str(error)
                damaged.append(row)
    per_block = rows_per_block(row_bytes)
    assert damaged == [row for row in range(column.shape[0]) if row // per_block == 10 // per_block]


def test_a_flipped_bit_anywhere_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    good, rng = Bundle(small_bundle()), random.Random(0)
    size, refused = small_bundle().stat().st_size, 0
    for _ in range(200):
        try:
            found = _flipped(tmp_path / "x.port", rng.randrange(size), rng.randrange(8))
            read_everything(found)
        except BundleError:
            refused += 1
        else:
            assert (found.id, found.graphs, found.plans, found.costs) == (good.id, good.graphs, good.plans, good.costs)
    assert refused > 150


def test_a_bundle_without_checksums_is_to_be_planned_again(tmp_path: Path) -> None:
    content = members(small_bundle())
    content["manifest.json"] = json.dumps({**json.loads(content["manifest.json"]), "format": 1}).encode()
    assemble(tmp_path / "old.port", content)
    with pytest.raises(BundleError, match=r"format 1, this version reads 2.*plan the job again"):
        Bundle(tmp_path / "old.port")


def test_the_identity_covers_weights_data_and_how_it_is_trained(tmp_path: Path) -> None:
    torch.manual_seed(0)
    same, other = make_job(), make_job()
    with torch.no_grad():
        next(other.model.parameters())[0, 0, 0, 0] += 1
    rows = make_job()
    rows.data[0][0, 0, 0, 0] += 1
    rate = make_job()
    rate.optimizer.param_groups[0]["lr"] = 2e-2
    ids = []
    for i, job in enumerate((same, other, rows, rate)):
        write_job(tmp_path / f"{i}.port", job)
        ids.append(Bundle(tmp_path / f"{i}.port").id)
    assert ids[0] == Bundle(small_bundle()).id and len(set(ids)) == 4


# -- hostile by chance


def _fuzz(tmp_path: Path, seed: int, count: int) -> None:
    rng = random.Random(seed)
    content = members(small_bundle())
    refused = 0
    for i in range(count):
        path = tmp_path / "x.port"
        try:
            write_mutated(rng, content, path)
        except (ValueError, TypeError, AttributeError, OverflowError):
            continue  # the mutation itself made something that cannot be written
        try:
            load(path)
        except PortError as error:
            refused += 1
            assert str(error)
        except Exception as error:
            raise AssertionError(f"mutation {i} of seed {seed} ended in {type(error).__name__}: {error}") from error
    assert refused > count / 3


@pytest.mark.parametrize("seed", range(2))
def test_mutated_bundles_give_clean_errors(seed: int, tmp_path: Path) -> None:
    _fuzz(tmp_path, seed, 250)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 110))
def test_ten_thousand_mutated_bundles_give_clean_errors(seed: int, tmp_path: Path) -> None:
    _fuzz(tmp_path, seed, 1000)
