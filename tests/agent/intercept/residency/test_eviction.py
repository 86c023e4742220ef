"""Who leaves first."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from port_agent.intercept.residency.eviction import EvictionPolicy
from port_agent.intercept.residency.storages import NEVER, Storage, StorageTable

NOW = 100


def storages(count: int) -> tuple[list[Storage], list[torch.Tensor]]:
    """Return records of resident storages, and what keeps them alive."""
    table = StorageTable(smallest_bytes=0)
    tensors = [torch.empty(64) for _ in range(count)]
    return [s for s in map(table.of, tensors) if s is not None], tensors


def in_order() -> EvictionPolicy:
    eviction = EvictionPolicy()
    eviction.put_in_order(())
    return eviction


def order_of(eviction: EvictionPolicy, clean: set[Storage]) -> list[Storage]:
    """Return who leaves, one after the other."""
    found: list[Storage] = []
    while (evicted := eviction.choose(NOW, found.__contains__, clean.__contains__)) is not None:
        found.append(evicted)
    return found


def test_what_is_needed_last_leaves_first() -> None:
    (soon, later, last), _alive = storages(3)
    eviction = in_order()
    for storage, next_use in ((later, 140), (soon, 110), (last, 190)):
        eviction.touch(storage, NOW, next_use)
    assert order_of(eviction, {soon, later, last}) == [last, later, soon]


def test_a_written_one_that_is_needed_little_later_than_a_clean_one_stays() -> None:
    (written, clean), _alive = storages(2)
    eviction = in_order()
    eviction.touch(written, NOW, 200)
    eviction.touch(clean, NOW, 180)
    assert order_of(eviction, {clean}) == [clean, written]


def test_pages_of_a_file_leave_before_what_must_be_written(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(1 << 16)}, tmp_path / "w.safetensors")
    weight, made = load_file(tmp_path / "w.safetensors")["weight"], torch.ones(64)
    table = StorageTable(smallest_bytes=0)
    mapped, written = table.of(weight), table.of(made)
    assert mapped is not None and written is not None
    mapped.resident = True
    for next_uses in ((110, 190), (None, None), (None, 190), (110, None)):
        eviction = in_order()
        for storage, next_use in zip((written, mapped), next_uses[::-1], strict=True):
            eviction.touch(storage, NOW, next_use)
        assert order_of(eviction, {mapped}) == [mapped, written]


def test_one_that_is_given_up_soon_is_not_written_before() -> None:
    (given_up, needed), _alive = storages(2)
    eviction = in_order()
    eviction.touch(given_up, NOW, NEVER, 110)
    eviction.touch(needed, NOW, 160)
    assert order_of(eviction, set()) == [needed, given_up]
    assert given_up.next_use == NEVER


def test_after_a_deviation_the_least_recently_used_leaves_first() -> None:
    (first, second), _alive = storages(2)
    eviction = in_order()
    eviction.touch(first, NOW - 2, 110)
    eviction.touch(second, NOW - 1, 190)
    eviction.drop_predictions()
    assert order_of(eviction, set()) == [first, second]


def test_choosing_does_not_look_at_all() -> None:
    """An LSTM over a thousand steps keeps 100,000 storages."""
    some, _alive = storages(600)
    eviction, asked = in_order(), 0
    for i, storage in enumerate(some):
        eviction.touch(storage, NOW, None if i % 3 == 0 else NOW + i)

    def keeps(storage: Storage) -> bool:
        nonlocal asked
        asked += 1
        return False

    for _ in some:
        evicted = eviction.choose(NOW, keeps, lambda storage: True)
        assert evicted is not None
        eviction.forget(evicted)
    assert asked <= 10 * len(some)


def test_before_anything_has_to_leave_the_last_uses_alone_are_kept() -> None:
    (first, second, third), _alive = storages(3)
    eviction = EvictionPolicy()
    for storage, clock in ((second, 20), (third, 30), (first, 10)):
        eviction.touch(storage, clock, None)
    eviction.put_in_order((third, first, second))
    assert order_of(eviction, set()) == [first, second, third]
