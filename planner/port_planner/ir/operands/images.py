"""The operands of operators on images, volumes and signals: pools, paddings, samples at places, transforms."""

import math

from port_planner.ir.operands.call import Fits, GraphCall
from port_planner.operators.row import ArgumentCheck

_NORMALIZATIONS = 3
"""Ways to scale a Fourier transform: none, by the root of the size, by the size (`fft_norm_mode` of ATen)."""


def _adaptive_average(call: GraphCall) -> bool:
    grad, shape = call.shape("grad_output"), call.shape("self")
    outer = len(shape) - call.spatial
    return outer in (1, 2) and len(grad) == len(shape) and grad[:outer] == shape[:outer] and 0 not in (*grad, *shape)


def _average_pool(call: GraphCall) -> bool:
    grad, shape = call.shape("grad_output"), call.shape("self")
    outer = len(shape) - call.spatial
    return len(grad) == len(shape) and grad[:outer] == shape[:outer]


def _padding(call: GraphCall) -> bool:
    grad, shape, pads = call.shape("grad_output"), call.shape("self"), call.sizes("padding")
    spatial = call.spatial
    if len(pads) != 2 * spatial or len(shape) - spatial not in (1, 2) or 0 in shape:
        return False
    inner = shape[len(shape) - spatial :]
    pairs = [(pads[2 * i], pads[2 * i + 1]) for i in reversed(range(spatial))]
    if call.name.startswith("reflection") and any(
        min(pair) < 0 or max(pair) >= n for pair, n in zip(pairs, inner, strict=True)
    ):
        return False
    padded = tuple(n + sum(pair) for n, pair in zip(inner, pairs, strict=True))
    return grad == (*shape[: len(shape) - spatial], *padded) and min(padded) > 0


def _grid_sampler(call: GraphCall) -> bool:
    """Check a grid sampler. Reflection at the border (padding mode 2) treats infinite coordinates as pixels."""
    image, grid = call.shape("input"), call.shape("grid")
    alike = len(image) == len(grid) == call.spatial + 2 and 0 not in image and call.size("padding_mode") in (0, 1)
    return alike and call.all_of("grad_output", (*image[:2], *grid[1:-1]))


def _max_pool(call: GraphCall) -> bool:
    made = call.made_by("indices", call.name.removesuffix("_backward"), 1)
    return made.shape("self") == call.shape("self") and call.shape("grad_output") == call.shape("indices")


def _unfold(call: GraphCall) -> bool:
    shape, dim = call.sizes("input_sizes"), call.size("dim")
    size, step = call.size("size"), call.size("step")
    dim += len(shape) if dim < 0 else 0
    if not 0 <= dim < len(shape) or step < 1 or not 0 < size <= shape[dim] or min(shape) < 1:
        return False
    return call.shape("grad_in") == (*shape[:dim], (shape[dim] - size) // step + 1, *shape[dim + 1 :], size)


def _fourier(call: GraphCall) -> bool:
    """Check a Fourier transform.

    Its dimensions are trusted to exist, each once, and the half spectrum of a real result to have the declared length.
    """
    shape, dims = call.shape("self"), call.sizes("dim")
    there = bool(dims) and 0 not in shape and all(0 <= d < len(shape) for d in dims) and len({*dims}) == len(dims)
    if not there or call.size("normalization") not in range(_NORMALIZATIONS):
        return False
    if "last_dim_size" not in call.arguments:
        return True
    size = call.size("last_dim_size")
    return size >= 1 and shape[dims[-1]] == size // 2 + 1


_SCALES = {1: ("scales",), 2: ("scales_h", "scales_w"), 3: ("scales_d", "scales_h", "scales_w")}
"""Names of the scale factors in operators, by the number of dimensions."""


def _upsampled(call: GraphCall) -> bool:
    """Check an upsampling.

    A scale given besides the sizes must roughly agree with them, because source indices are computed from it.
    """
    source = call.sizes("input_size") if "input_size" in call.arguments else call.shape("self")
    target, spatial = call.sizes("output_size"), call.spatial
    sizes = zip(source[-spatial:], target, map(call.arguments.get, _SCALES[spatial]), strict=False)
    return (
        len(source) == spatial + 2
        and len(target) == spatial
        and all(
            scale is None
            or (isinstance(scale, int | float) and math.isfinite(scale) and scale > 0 and out <= scale * n + 1)
            for n, out, scale in sizes
        )
    )


RULES: dict[ArgumentCheck, Fits] = {
    ArgumentCheck.ADAPTIVE_AVERAGE: _adaptive_average,
    ArgumentCheck.AVERAGE_POOL: _average_pool,
    ArgumentCheck.PADDING: _padding,
    ArgumentCheck.GRID_SAMPLER: _grid_sampler,
    ArgumentCheck.MAX_POOL: _max_pool,
    ArgumentCheck.UNFOLD: _unfold,
    ArgumentCheck.FOURIER: _fourier,
    ArgumentCheck.UPSAMPLE: _upsampled,
}
