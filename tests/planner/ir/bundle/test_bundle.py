"""Bundles from strangers: whatever is in the file, the loader gives a job that holds or an error with its reason."""

import json
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from planner.ir.bundle.bundle import OPTIMIZERS, Bundle, BundleError, read_manifest
from planner.ir.bundle.codec import WireError, pack_integers, pack_plan, unpack_plan
from planner.ir.errors import PortError
from planner.ir.graph import GraphError
from planner.ir.lowering.lower import lower
from planner.ir.lowering.optimizer_scalars import SUPPORTED
from planner.ir.operators import OperatorError
from planner.ir.plan import Action
from planner.ir.program import BudgetError, PlanError
from tests.agent.jobs_small import small_bundle
from tests.planner.bundles import assemble, closed_plan, members, opened_plan, rewrite


def load(path: Path) -> Bundle:
    """Load a bundle as a worker does: every graph is lowered under every plan."""
    bundle = Bundle(path)
    for choice in bundle.plans:
        for name, plan in choice.items():
            lower(bundle.graphs[name], bundle.costs[name], plan)
    return bundle


def test_a_good_bundle_loads_and_hashes_fit(tmp_path: Path) -> None:
    bundle = load(small_bundle())
    bundle.verify_tensors()
    assert read_manifest(small_bundle()) == bundle.manifest
    copy = tmp_path / "copy.port"
    rewrite(small_bundle(), copy, {})
    assert load(copy).graphs == bundle.graphs
    for choice in bundle.plans:
        for plan in choice.values():
            assert unpack_plan(msgpack.unpackb(msgpack.packb(pack_plan(plan)))) == plan


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


MANIFESTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "other format": lambda m: {**m, "format": 99},
    "no hashes": lambda m: {**m, "hashes": None},
    "missing field": lambda m: {k: v for k, v in m.items() if k != "plans"},
    "batch size 0": lambda m: {**m, "batch_size": 0},
    "a million threads": lambda m: {**m, "threads": 10**6},
    "samples as text": lambda m: {**m, "samples": "many"},
    "plans as text": lambda m: {**m, "plans": "abc"},
    "fills as text": lambda m: {**m, "fills": {"state/x": "a"}},
    "layouts of nothing": lambda m: {**m, "layouts": {"parameter/x": {}}},
    "optimizer as text": lambda m: {**m, "optimizer": "AdamW"},
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
    load(path).verify_tensors()
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


def test_a_flipped_bit_in_the_tensors_is_found(tmp_path: Path) -> None:
    data = bytearray(small_bundle().read_bytes())
    bundle = Bundle(small_bundle())
    member = bundle.tensors["parameter/7.weight"]
    data[member.offset + member.nbytes // 2] ^= 1
    (tmp_path / "x.port").write_bytes(data)
    with pytest.raises(BundleError, match="damaged"):
        Bundle(tmp_path / "x.port").verify_tensors()


# -- hostile by chance


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


STRANGE = (0, 1, -1, 2, 7, 255, 1 << 31, 1 << 62, 1 << 63, -(1 << 60), 0.5, float("nan"), float("inf"), "", "aten::add.Tensor",
           "x" * 5000, None, True, [], {}, [0] * 100, {"v": 0}, {"v": 10**7}, {"s": 3}, {"n": ["dtype", "float32"]}, b"\0")  # fmt: skip


def _mutate_tree(rng: random.Random, tree: Any) -> Any:
    """Change one random leaf or branch of nested lists and tables."""
    node, path = tree, []
    while isinstance(node, list | dict) and node and (len(path) < 2 or rng.random() < 0.85):
        key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        path.append((node, key))
        node = node[key]
    if not path:
        return rng.choice(STRANGE)
    parent, key = path[-1]
    match rng.randrange(5):
        case 0 | 1:
            parent[key] = rng.choice(STRANGE)
        case 2 if isinstance(node, int) and not isinstance(node, bool):
            parent[key] = node + rng.choice([-1, 1, 8, -8, 1000])
        case 3:
            del parent[key]
        case _:
            if isinstance(parent, list):
                other = rng.randrange(len(parent))
                parent[key], parent[other] = parent[other], parent[key]
            else:
                parent[key] = rng.choice(STRANGE)
    return tree


def _mutated(rng: random.Random, content: dict[str, bytes], path: Path) -> None:
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


def _fuzz(tmp_path: Path, seed: int, count: int) -> None:
    rng = random.Random(seed)
    content = members(small_bundle())
    refused = 0
    for i in range(count):
        path = tmp_path / "x.port"
        try:
            _mutated(rng, content, path)
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
