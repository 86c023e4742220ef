"""What passes by itself is told from what stays, also below the error that says it."""

import errno

import pytest

from port_agent.system.passing_errors import is_passing
from port_planner.base.errors import PortError


def wrapped(number: int) -> PortError:
    try:
        try:
            raise OSError(number, "it failed")
        except OSError as error:
            raise PortError("the bundle cannot be read") from error
    except PortError as error:
        return error


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.ESTALE])
def test_a_cause_that_passes(number: int) -> None:
    assert is_passing(OSError(number, "it failed")) and is_passing(wrapped(number))


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.ENOSPC])
def test_a_cause_that_stays(number: int) -> None:
    assert not is_passing(OSError(number, "it failed")) and not is_passing(wrapped(number))
    assert not is_passing(PortError("damaged")) and not is_passing(ValueError())
