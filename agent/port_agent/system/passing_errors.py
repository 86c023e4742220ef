"""Errors of files that are temporary, after which the operation is retried."""

import errno

PASSING = frozenset(
    {
        errno.EMFILE,
        errno.ENFILE,
        errno.EIO,
        errno.ESTALE,
        errno.EAGAIN,
        errno.EINTR,
        errno.EBUSY,
        errno.ETIMEDOUT,
        errno.ENOTCONN,
    }
)
"""Errors that pass: too many open files, a cable or card that lost contact, a file server that was offline."""


def is_passing(error: BaseException) -> bool:
    """Return whether an error, or its cause, is of a kind that passes."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in PASSING:
            return True
        cause = cause.__cause__
    return False
