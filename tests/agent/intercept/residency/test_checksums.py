"""What a device's bytes add up to."""

import pytest
import torch

from port_agent.intercept.residency import checksums
from port_agent.intercept.residency.checksums import Checksums


@pytest.mark.parametrize("nbytes", [1, 7, 4096, 4097, 3 * 4096 + 5, 40_000, 3 * 32_768 + 13])
def test_a_sum_differs_where_a_byte_or_their_order_does(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "PART_BYTES", 65_536)
    sums = Checksums(torch.device("cpu"))
    contents = (torch.arange(nbytes) * 37 % 251).to(torch.uint8)
    before = sums.of(contents)
    assert torch.equal(Checksums(torch.device("cpu")).of(contents.clone()), before)
    for place in {0, 7, nbytes // 2, nbytes // 2 | 7, nbytes - 1} & set(range(nbytes)):
        for bit in (0x01, 0x80):  # the highest of a word, too
            changed = contents.clone()
            changed[place] ^= bit
            assert not torch.equal(sums.of(changed), before), (place, bit)
    for first, second in {
        (0, nbytes - 1),
        (0, min(4, nbytes - 1)),
        (nbytes // 3, nbytes // 2),
        (8, nbytes // 2 // 8 * 8),
    }:
        if first < nbytes and contents[first] != contents[second]:
            swapped = contents.clone()
            swapped[[first, second]] = contents[[second, first]]
            assert not torch.equal(sums.of(swapped), before), (first, second)


def test_neighbours_along_a_diagonal_may_not_change_places() -> None:
    """Words whose row and column add up to the same number."""
    words = torch.zeros(4, 4096, dtype=torch.int64)
    words[1, 0], words[0, 1] = 3, 5
    swapped = words.clone()
    swapped[1, 0], swapped[0, 1] = 5, 3
    sums = Checksums(torch.device("cpu"))
    first, second = (sums.of(t.view(-1).view(torch.uint8)) for t in (words, swapped))
    assert not torch.equal(first, second)
