"""Bounds on data from files and other devices, as annotations that msgspec checks."""

from typing import Annotated

import msgspec

MAX_WHOLE = 1 << 62
"""Counts, sizes and seeds are below it."""
Count = Annotated[int, msgspec.Meta(ge=0, lt=MAX_WHOLE)]
"""A number of bytes or an index; far from where sums of a few overflow 64 bits."""
Figure = Annotated[float, msgspec.Meta(ge=0, lt=1e30)]
"""Seconds, joules, watts: finite, not below 0."""
PositiveFigure = Annotated[float, msgspec.Meta(gt=0, lt=1e30)]
Text = Annotated[str, msgspec.Meta(max_length=1000)]
