"""Exit codes that scripts and service managers rely on, and errors that are refused as asked."""

from port_planner.base.errors import CaptureError, ExitCode, PortError


def test_the_numbers_never_change() -> None:
    assert {code.name: int(code) for code in ExitCode} == {
        "DONE": 0,
        "FAILED": 1,
        "IMPOSSIBLE": 2,
        "UNREACHABLE": 3,
        "DIVERGED": 4,
        "LEFT": 75,
        "CONFIG": 78,
        "INTERRUPTED": 130,
    }


def test_an_error_fails_and_one_that_can_never_work_says_so() -> None:
    assert PortError("disk full").exit_code == 1 and CaptureError("a branch").exit_code == 2
