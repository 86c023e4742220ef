"""A shard as text: what is written is read back, and nothing else is one."""

import pytest

from port_agent.worker.shard import Shard


def test_a_shard_is_read_back() -> None:
    assert Shard.parse(str(Shard(2, 3))) == Shard(2, 3)


@pytest.mark.parametrize("text", ["", "3", "0/3", "4/3", "-1/3", "1/0", "1/3/5", "1 /3", "1/3\n", "9999999/9999999"])
def test_anything_else_is_no_shard(text: str) -> None:
    with pytest.raises(ValueError, match="write it as 2/3"):
        Shard.parse(text)
