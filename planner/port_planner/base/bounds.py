"""Bounds on data from files and other devices, as annotations that msgspec checks."""

from typing import Annotated

import msgspec

MAX_WHOLE = 1 << 62
"""Upper limit of counts, sizes and seeds."""
Count = Annotated[int, msgspec.Meta(ge=0, lt=MAX_WHOLE)]
"""A number of bytes or an index, small enough that sums of a few do not overflow 64 bits."""
Figure = Annotated[float, msgspec.Meta(ge=0, lt=1e30)]
"""A finite number of seconds, joules or watts, not below 0."""
PositiveFigure = Annotated[float, msgspec.Meta(gt=0, lt=1e30)]
Text = Annotated[str, msgspec.Meta(max_length=1000)]
