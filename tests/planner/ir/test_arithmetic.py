"""Settings of torch's arithmetic, as they stand in bundles and messages."""

import msgspec

from port_planner.ir.arithmetic import Arithmetic, differences

PLAIN = Arithmetic(4, True, ("ieee", "ieee", "tf32"))


def test_differences_are_said_by_name() -> None:
    other = PLAIN._replace(onednn=False, precisions=("bf16", "ieee", "tf32"), deterministic=2)
    assert list(differences(other, PLAIN)) == [
        "onednn off instead of on",
        "precisions matmul bf16, conv ieee, rnn tf32 instead of matmul ieee, conv ieee, rnn tf32",
        "deterministic 2 instead of 0",
    ]
    assert not list(differences(PLAIN, PLAIN))


def test_they_come_back_from_a_file() -> None:
    assert msgspec.convert(msgspec.json.decode(msgspec.json.encode(PLAIN)), Arithmetic) == PLAIN
