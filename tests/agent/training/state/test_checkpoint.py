"""State on disk: torn, flipped, cut off at any point, of another job; what was committed comes back."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
import xxhash
from torch import nn

from port_agent.paging.pager import CHUNK, CorruptPageError, Pager
from port_agent.training.state.checkpoint import SLOTS, CheckpointError, StateStore
from port_agent.training.trainer import Trainer
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.manifest import FileRange
from port_planner.job import TrainingJob
from tests.agent.jobs_small import classify, write_job
from tests.agent.training.options import train_options
from tests.agent.training.trained_job import STEPS, train, trainer


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], str]:
    return train(tmp_path_factory.mktemp("reference"), plan=0)


# -- what lies on flash is damaged


def _flip(path: Path, place: int) -> None:
    with open(path, "r+b") as stream:
        stream.seek(place)
        byte = stream.read(1)[0]
        stream.seek(place)
        stream.write(bytes([byte ^ 4]))


def _latest(folder: Path) -> tuple[Path, dict[str, Any]]:
    found = [(p, msgpack.unpackb(p.read_bytes()[:-8])) for p in folder.glob("commit.?")]
    return max(found, key=lambda f: f[1]["sequence"])


def wide_job() -> TrainingJob:
    """Return a job with weights and momenta of half a megabyte."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))
    data = [torch.randn(32, 512), torch.randint(0, 10, (32,))]
    return TrainingJob(model, classify, torch.optim.AdamW(model.parameters(), lr=1e-3), data, 8)


@pytest.mark.slow
def test_state_that_lies_packed_gives_the_same_training_from_fewer_bytes_and_resumes(tmp_path: Path) -> None:
    digests, written = [], []
    for packs, version in ((False, 1), (True, 2)):
        path, folder = tmp_path / f"{packs}.port", tmp_path / f"state-{packs}"
        write_job(path, wide_job(), packs_pages=packs)
        first = Trainer(Bundle(path), train_options(folder, folder, 1, 4))
        first.start()
        first.train(lambda _: None, lambda *_: None)
        written.append(first.pager.stats.written_bytes)
        first.close()
        assert _latest(folder)[1]["version"] == version, "without packed pages older agents read it, too"
        resumed = Trainer(Bundle(path), train_options(folder, folder, 1, STEPS))
        assert resumed.start().step == 4
        resumed.train(lambda _: None, lambda *_: None)
        digests.append(resumed.digest())
        resumed.close()
    assert digests[0] == digests[1] and written[1] < 0.9 * written[0]


@pytest.mark.slow
def test_the_zeros_that_an_optimizer_begins_with_are_not_written(tmp_path: Path) -> None:
    path, folder = tmp_path / "wide.port", tmp_path / "state"
    write_job(path, wide_job())
    first = Trainer(Bundle(path), train_options(folder, folder, 1, 4))
    first.start()
    moments = sum(n for key, n in first.store.sizes.items() if key.startswith("state/"))
    assert moments >= 2 * 4 * 512 * 256 and _latest(folder)[1]["version"] == 3
    assert first.pager.stats.written_bytes <= sum(first.store.sizes.values()) - moments
    first.close()
    again = Trainer(Bundle(path), train_options(folder, folder, 1, 4))
    assert again.start().step == 0
    again.train(lambda _: None, lambda *_: None)
    assert _latest(folder)[1]["version"] == 1, "what older agents read, too"
    begun = Trainer(Bundle(path), train_options(tmp_path / "other", tmp_path / "other", 1, 4))
    begun.start()
    begun.train(lambda _: None, lambda *_: None)
    assert again.digest() == begun.digest()
    again.close()
    begun.close()


@pytest.mark.slow
def test_a_flipped_bit_in_the_state_costs_one_commit(tmp_path: Path, reference: tuple[list[float], str]) -> None:
    train(tmp_path, stop_after=6)
    _, record = _latest(tmp_path)
    with_offsets = trainer(tmp_path)
    key = "parameter/7.weight"
    slot = with_offsets.store._slots[key][record["slots"][key][0]]
    with_offsets.close()
    _flip(tmp_path / "state.pages", slot.offset + 77)
    losses, digest = train(tmp_path)
    assert digest == reference[1]
    assert len(losses) == STEPS - record["step"] + 1


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "gone", "other version"])
def test_a_torn_commit_record_leaves_the_one_before(
    damage: str, tmp_path: Path, reference: tuple[list[float], str]
) -> None:
    train(tmp_path, stop_after=6)
    path, record = _latest(tmp_path)
    data = path.read_bytes()
    match damage:
        case "cut":
            path.write_bytes(data[: len(data) // 2])
        case "flip":
            _flip(path, len(data) // 2)
        case "empty":
            path.write_bytes(b"")
        case "gone":
            path.unlink()
        case _:
            body = msgpack.packb({**record, "version": 99})
            path.write_bytes(body + xxhash.xxh3_64_digest(body))
    t = trainer(tmp_path)
    assert t.start().step == record["step"] - 1
    t.close()
    assert train(tmp_path)[1] == reference[1]


@pytest.mark.slow
def test_the_state_of_another_job_is_refused(tmp_path: Path) -> None:
    train(tmp_path, stop_after=2)
    t = trainer(tmp_path, accumulate=3)
    with pytest.raises(CheckpointError, match="another job"):
        t.start()
    t.close()


# -- commits are all or nothing


class PowerCut(BaseException):
    """Not an Exception: nothing catches it on the way."""


def _cut_at(monkeypatch: pytest.MonkeyPatch, count: int) -> Callable[[], bool]:
    """Let the power fail before the `count`-th call that touches the medium; says whether it did."""
    calls = [0]

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] >= count:
                raise PowerCut
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, counted)

    for name in ("fsync", "fdatasync", "replace", "open"):
        wrap(name)
    return lambda: calls[0] >= count


def test_a_power_cut_at_any_point_of_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {f"parameter/{i}": 5000 * (i + 1) for i in range(4)}
    pager = Pager()
    cuts = 0
    for count in range(1, 12):
        folder = tmp_path / str(count)
        store = StateStore(folder, sizes, pager, job="j")
        store.create(lambda k: [torch.zeros(sizes[k], dtype=torch.uint8)], {"x": 0})
        for value in (1, 2):
            for key, nbytes in sizes.items():
                pager.wait(store.write(key, torch.full((nbytes,), value, dtype=torch.uint8)))
            if value == 1:
                store.commit(1, {"x": 1})
        with monkeypatch.context() as patch:
            cut = _cut_at(patch, count)
            try:
                store.commit(2, {"x": 2})
            except PowerCut:
                cuts += 1
            assert cut() or count > 4
        again = StateStore(folder, sizes, pager, job="j")
        commit = again.open()
        assert commit is not None and commit.step in (1, 2) and commit.progress == {"x": commit.step}
        for key, nbytes in sizes.items():
            assert (again.load(key)[:nbytes] == commit.step).all()
        store.close()
        again.close()
    pager.close()
    assert cuts >= 3


def test_contents_written_after_a_commit_do_not_touch_it(tmp_path: Path) -> None:
    """Random writes and commits; opening again at any moment gives exactly what the last commit said."""
    g = torch.Generator().manual_seed(5)
    sizes = {"parameter/a": 10_000, "state/b": 4096, "buffer/c": 3}
    pager = Pager()
    store = StateStore(tmp_path, sizes, pager, job="j")
    present = {k: torch.zeros(n, dtype=torch.uint8) for k, n in sizes.items()}
    store.create(lambda k: [present[k]], {})
    committed = dict(present)
    for step in range(40):
        for key, nbytes in sizes.items():
            if torch.rand((), generator=g) < 0.5:
                present[key] = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=g)
                pager.wait(store.write(key, present[key]))
        if torch.rand((), generator=g) < 0.5:
            store.commit(step, {})
            committed = dict(present)
        for key, nbytes in sizes.items():
            assert torch.equal(store.load(key)[:nbytes], present[key])
        other = StateStore(tmp_path, sizes, pager, job="j")
        assert other.open() is not None
        for key, nbytes in sizes.items():
            assert torch.equal(other.load(key)[:nbytes], committed[key])
        other.close()
    assert len(list(tmp_path.glob("commit.?"))) == SLOTS
    store.close()
    pager.close()


# -- frozen weights in files of the user's

OFFSET, FROZEN_BYTES = 12_345, 3 * CHUNK + 777
"""Neither is a multiple of a block."""


def _weights(path: Path) -> tuple[torch.Tensor, dict[str, FileRange]]:
    """Write a file that ends with a tensor; return that, and where it lies."""
    contents = torch.randint(0, 256, (FROZEN_BYTES,), dtype=torch.uint8)
    path.write_bytes(b"x" * OFFSET + contents.numpy().tobytes())
    return contents, {"parameter/frozen": FileRange(str(path), OFFSET, FROZEN_BYTES, "")}


def _begun(folder: Path, pager: Pager, contents: torch.Tensor, files: dict[str, FileRange]) -> StateStore:
    store = StateStore(folder, {"parameter/frozen": FROZEN_BYTES, "state/b": 4096}, pager, job="j", in_files=files)
    begin = {"parameter/frozen": list(contents.split(CHUNK)), "state/b": [torch.ones(4096, dtype=torch.uint8)]}
    store.create(begin.__getitem__, {})
    return store


def test_frozen_weights_are_read_from_their_file_and_never_written(tmp_path: Path) -> None:
    contents, files = _weights(tmp_path / "weights")
    pager = Pager()
    store = _begun(tmp_path / "state", pager, contents, files)
    assert pager.stats.written_bytes == 4096
    assert (tmp_path / "state" / "state.pages").stat().st_size == SLOTS * 4096
    assert _latest(tmp_path / "state")[1]["version"] == 4
    pager.wait(store.write("state/b", torch.full((4096,), 7, dtype=torch.uint8)))
    store.commit(1, {})
    store.close()
    again = StateStore(tmp_path / "state", store.sizes, pager, job="j", in_files=files)
    assert again.open() is not None
    assert torch.equal(again.load("parameter/frozen")[:FROZEN_BYTES], contents)
    assert (again.load("state/b")[:4096] == 7).all()
    aside = torch.zeros(FROZEN_BYTES + 3, dtype=torch.uint8)[3:]
    pager.wait(pager.receive(again.slot("parameter/frozen"), aside))
    assert torch.equal(aside, contents)
    again.close()
    with pytest.raises(CheckpointError, match=r"began with the bundle's own weights; continue without others"):
        StateStore(tmp_path / "state", store.sizes, pager, job="j")
    pager.close()


@pytest.mark.parametrize("place", [0, CHUNK + 1, FROZEN_BYTES - 1])
def test_a_file_that_changed_is_named_wherever_it_changed(place: int, tmp_path: Path) -> None:
    contents, files = _weights(tmp_path / "weights")
    pager = Pager()
    _begun(tmp_path / "state", pager, contents, files).close()
    _flip(tmp_path / "weights", OFFSET + place)
    again = StateStore(
        tmp_path / "state", {"parameter/frozen": FROZEN_BYTES, "state/b": 4096}, pager, job="j", in_files=files
    )
    assert again.open() is not None
    with pytest.raises(CorruptPageError) as caught:
        again.load("parameter/frozen")
    assert again.lies_in_file(caught.value.path) and not again.avoid(caught.value.offset)
    os.truncate(tmp_path / "weights", OFFSET + place)
    with pytest.raises(CorruptPageError, match=r"weights ends at offset"):
        again.load("parameter/frozen")
    again.close()
    pager.close()


def test_a_state_that_began_with_copies_goes_on_with_them(tmp_path: Path) -> None:
    contents, files = _weights(tmp_path / "weights")
    pager = Pager()
    _begun(tmp_path / "state", pager, contents, {}).close()
    (tmp_path / "weights").unlink()
    again = StateStore(
        tmp_path / "state", {"parameter/frozen": FROZEN_BYTES, "state/b": 4096}, pager, job="j", in_files=files
    )
    assert again.open() is not None and _latest(tmp_path / "state")[1]["version"] == 1
    assert torch.equal(again.load("parameter/frozen")[:FROZEN_BYTES], contents)
    again.commit(1, {})
    assert _latest(tmp_path / "state")[1]["version"] == 1
    again.close()
    pager.close()
