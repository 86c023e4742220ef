"""Tracebacks without this package's frames, so that an error in the program shows the program's own lines."""

import types

from port_planner.base.source_roots import PACKAGE_FOLDERS

_OURS = tuple(f"{folder}/" for folder in PACKAGE_FOLDERS)
_BOOTSTRAP = "<string>"
_CALLED_BY_US = "torch/_ops.py"
"""File through which an operator passes that a dispatch mode called; one that the program called
does not pass through it.
"""


def clean_exception(error: BaseException) -> None:
    """Remove our frames from the traceback of an exception, and from those of its causes."""
    pending, seen = [error], set[int]()
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = without_ours(one.__traceback__)
        pending += [e for e in (one.__cause__, one.__context__) if e is not None]
        if isinstance(one, BaseExceptionGroup):
            pending += one.exceptions


def without_ours(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """Return the traceback without our frames, the bootstrap's, and torch's frames that we caused."""
    kept = []
    called_by_us = True  # the outermost frame is the bootstrap
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if name.startswith(_OURS):
            called_by_us = True
        elif not (called_by_us and (name == _BOOTSTRAP or name.endswith(_CALLED_BY_US))):
            kept.append(traceback)
            called_by_us = False
        traceback = traceback.tb_next
    for one, following in zip(kept, [*kept[1:], None], strict=True) if kept else ():
        one.tb_next = following
    return kept[0] if kept else None
