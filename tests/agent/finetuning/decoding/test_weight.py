"""A weight comes whole and in order, in parts that begin where codes of neighbouring rows do not share a word."""

import pytest
import torch

from port_agent.finetuning.decoding import weight as weight_module
from port_agent.finetuning.decoding.weight import DecodedWeight


@pytest.mark.parametrize("shape", [(130, 3), (130,), (64, 5), (1, 2), (70, 2, 3)])
def test_its_parts_are_the_whole(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_module, "_PART_ITEMS", 10)
    whole, starts = torch.rand(shape), []

    def rows(start: int, stop: int) -> torch.Tensor:
        starts.append(start)
        return whole[start:stop]

    given = DecodedWeight(shape, rows, is_coded=False)
    assert torch.equal(torch.cat(list(given.parts())), whole) and given.items == whole.numel()
    assert starts == list(range(0, shape[0], 64))


def test_large_parts_are_of_some_rows_and_a_number_is_one() -> None:
    given = DecodedWeight((1 << 20, 4), lambda start, stop: torch.empty(stop - start, 4), is_coded=True)
    assert {len(part) for part in given.parts()} == {1 << 17}
    one = DecodedWeight((), lambda start, stop: torch.tensor(3.0), is_coded=False)
    assert [part.item() for part in one.parts()] == [3.0] and one.items == 1
