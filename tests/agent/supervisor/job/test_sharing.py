"""Memory and processors among workers that run at the same time."""

import math

from port_agent.supervisor.job.board_places import THIS_COMPUTER
from port_agent.supervisor.job.sharing import Claim, CpuShare, admit, cpu_shares

HOST = Claim(1, THIS_COMPUTER, 0)
LEFT, RIGHT = Claim(2, "/dev/left", 0), Claim(3, "/dev/right", 5)
LEAST = {1: 500.0, 2: 100.0, 3: 100.0, 4: math.inf, 5: 0.0}


def least(claim: Claim) -> float:
    return LEAST[claim.job_id]


def test_each_place_takes_the_first_in_line_that_fits() -> None:
    second, hopeless = Claim(5, THIS_COMPUTER, 0), Claim(4, THIS_COMPUTER, 9)
    assert admit([HOST, second, LEFT, RIGHT], least, None) == {"": HOST, "/dev/left": LEFT, "/dev/right": RIGHT}
    assert admit([hopeless, HOST], least, None) == {"": HOST}, "no memory is enough for the first"
    assert admit([HOST, second], least, 499) == {"": second}


def test_memory_goes_to_those_before_in_line() -> None:
    assert admit([HOST, LEFT, RIGHT], least, 700) == {"": HOST, "/dev/left": LEFT, "/dev/right": RIGHT}
    assert admit([HOST, LEFT, RIGHT], least, 699) == {"": HOST, "/dev/left": LEFT}
    assert admit([RIGHT, LEFT, HOST], least, 699) == {"/dev/right": RIGHT, "/dev/left": LEFT}


def test_a_limited_grant_is_never_exceeded_and_an_unlimited_one_is_left_to_the_weights() -> None:
    both = {claim.place: claim for claim in (HOST, LEFT, RIGHT)}
    assert {share.share for share in cpu_shares(both, 100.0).values()} == {1.0}
    for boards in range(12):
        several = {str(i): Claim(i, str(i), 0) for i in range(1, boards + 1)}
        for admitted in (several, {**several, THIS_COMPUTER: HOST}):
            shares = cpu_shares(admitted, 50.0)
            assert sum(share.share for share in shares.values()) <= 1.0 + 1e-9
            assert all(share.share > 0 for share in shares.values())
            if THIS_COMPUTER in admitted:
                assert shares[THIS_COMPUTER].share >= 0.5


def test_a_higher_priority_has_twice_the_weight_of_the_next() -> None:
    shares = cpu_shares({claim.place: claim for claim in (HOST, LEFT, RIGHT)}, 100.0)
    assert (shares[""].rank, shares["/dev/left"].rank, shares["/dev/right"].rank) == (0, 0, 1)
    assert cpu_shares({"": HOST}, 25.0) == {"": CpuShare()}
