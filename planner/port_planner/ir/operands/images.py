"""What operators on images, volumes and signals are called with: pools, paddings, samples at places, transforms."""

import math

from port_planner.ir.operands.call import Fits, GraphCall, Rule

_NORMALIZATIONS = 3
"""Ways to scale a Fourier transform: not, by the root of the size, by the size (`fft_norm_mode` of ATen)."""


def _adaptive_average(spatial: int) -> Fits:
    def fits(call: GraphCall) -> bool:
        grad, shape = call.shape("grad_output"), call.shape("self")
        outer = len(shape) - spatial
        return (
            outer in (1, 2) and len(grad) == len(shape) and grad[:outer] == shape[:outer] and 0 not in (*grad, *shape)
        )

    return fits


def _average_pool(spatial: int) -> Fits:
    def fits(call: GraphCall) -> bool:
        grad, shape = call.shape("grad_output"), call.shape("self")
        return len(grad) == len(shape) and grad[: len(shape) - spatial] == shape[: len(shape) - spatial]

    return fits


def _padding(spatial: int, *, reflection: bool) -> Fits:
    def fits(call: GraphCall) -> bool:
        grad, shape, pads = call.shape("grad_output"), call.shape("self"), call.sizes("padding")
        if len(pads) != 2 * spatial or len(shape) - spatial not in (1, 2) or 0 in shape:
            return False
        inner = shape[len(shape) - spatial :]
        pairs = [(pads[2 * i], pads[2 * i + 1]) for i in reversed(range(spatial))]
        if reflection and any(min(pair) < 0 or max(pair) >= n for pair, n in zip(pairs, inner, strict=True)):
            return False
        padded = tuple(n + sum(pair) for n, pair in zip(inner, pairs, strict=True))
        return grad == (*shape[: len(shape) - spatial], *padded) and min(padded) > 0

    return fits


def _grid_sampler(spatial: int) -> Fits:
    """Reflection at the border (padding mode 2) takes coordinates that are infinite for pixels."""

    def fits(call: GraphCall) -> bool:
        image, grid = call.shape("input"), call.shape("grid")
        alike = len(image) == len(grid) == spatial + 2 and 0 not in image and call.size("padding_mode") in (0, 1)
        return alike and call.all_of("grad_output", (*image[:2], *grid[1:-1]))

    return fits


def _max_pool(forward: str) -> Fits:
    def fits(call: GraphCall) -> bool:
        made = call.made_by("indices", forward, 1)
        return made.shape("self") == call.shape("self") and call.shape("grad_output") == call.shape("indices")

    return fits


def _unfold(call: GraphCall) -> bool:
    shape, dim = call.sizes("input_sizes"), call.size("dim")
    size, step = call.size("size"), call.size("step")
    dim += len(shape) if dim < 0 else 0
    if not 0 <= dim < len(shape) or step < 1 or not 0 < size <= shape[dim] or min(shape) < 1:
        return False
    return call.shape("grad_in") == (*shape[:dim], (shape[dim] - size) // step + 1, *shape[dim + 1 :], size)


def _fourier(call: GraphCall) -> bool:
    """Dimensions are trusted to be there, each once, and the half that a real result is made of to be as long as it says."""
    shape, dims = call.shape("self"), call.sizes("dim")
    there = bool(dims) and 0 not in shape and all(0 <= d < len(shape) for d in dims) and len({*dims}) == len(dims)
    if not there or call.size("normalization") not in range(_NORMALIZATIONS):
        return False
    if "last_dim_size" not in call.arguments:
        return True
    size = call.size("last_dim_size")
    return size >= 1 and shape[dims[-1]] == size // 2 + 1


_SCALES = {1: ("scales",), 2: ("scales_h", "scales_w"), 3: ("scales_d", "scales_h", "scales_w")}
"""How operators name what sizes are scaled by, by the number of dimensions."""


def _upsampled(spatial: int) -> Fits:
    """A scale beside the sizes must be about what they say: source indices are computed with it."""

    def fits(call: GraphCall) -> bool:
        source = call.sizes("input_size") if "input_size" in call.arguments else call.shape("self")
        target = call.sizes("output_size")
        sizes = zip(source[-spatial:], target, map(call.arguments.get, _SCALES[spatial]), strict=False)
        return len(source) == spatial + 2 and len(target) == spatial and all(
            scale is None or (isinstance(scale, int | float) and math.isfinite(scale) and scale > 0 and out <= scale * n + 1)
            for n, out, scale in sizes
        )  # fmt: skip

    return fits


_UPSAMPLE = {
    1: ("nearest1d", "nearest_exact1d", "linear1d"),
    2: ("nearest2d", "nearest_exact2d", "bilinear2d", "bilinear2d_aa", "bicubic2d", "bicubic2d_aa"),
    3: ("nearest3d", "nearest_exact3d", "trilinear3d"),
}


def _upsample_rules() -> dict[str, Rule]:
    rules = {}
    for spatial, kinds in _UPSAMPLE.items():
        scales = " ".join(_SCALES[spatial])
        for kind in kinds:
            corners = "" if kind.startswith("nearest") else "align_corners "
            hidden = "_" if kind.endswith("_aa") or "exact" in kind else ""
            name = f"{hidden}upsample_{kind}"
            rules[name] = (f"self output_size {corners}{scales}", _upsampled(spatial))
            rules[f"{name}_backward"] = (f"grad_output output_size input_size {corners}{scales}", _upsampled(spatial))
    return rules


_POOL = "grad_output self kernel_size stride padding dilation ceil_mode indices"
_POOLED = "self kernel_size stride padding dilation ceil_mode"
_AVERAGE = "grad_output self kernel_size stride padding ceil_mode count_include_pad divisor_override"
_FRACTIONAL = "self kernel_size output_size"
_GRID = "input grid interpolation_mode padding_mode align_corners"

RULES: dict[str, Rule] = {
    "_adaptive_avg_pool2d_backward": ("grad_output self", _adaptive_average(2)),
    "_adaptive_avg_pool3d_backward": ("grad_output self", _adaptive_average(3)),
    "avg_pool2d_backward": (_AVERAGE, _average_pool(2)),
    "avg_pool3d_backward": (_AVERAGE, _average_pool(3)),
    "reflection_pad1d_backward": ("grad_output self padding", _padding(1, reflection=True)),
    "reflection_pad2d_backward": ("grad_output self padding", _padding(2, reflection=True)),
    "reflection_pad3d_backward": ("grad_output self padding", _padding(3, reflection=True)),
    "replication_pad1d_backward": ("grad_output self padding", _padding(1, reflection=False)),
    "replication_pad2d_backward": ("grad_output self padding", _padding(2, reflection=False)),
    "replication_pad3d_backward": ("grad_output self padding", _padding(3, reflection=False)),
    "grid_sampler_2d": (_GRID, _grid_sampler(2)),
    "grid_sampler_2d_backward": (f"grad_output {_GRID} output_mask", _grid_sampler(2)),
    "grid_sampler_3d": (_GRID, _grid_sampler(3)),
    "grid_sampler_3d_backward": (f"grad_output {_GRID} output_mask", _grid_sampler(3)),
    "max_pool2d_with_indices_backward": (_POOL, _max_pool("max_pool2d_with_indices")),
    "max_pool3d_with_indices_backward": (_POOL, _max_pool("max_pool3d_with_indices")),
    "adaptive_max_pool2d_backward": ("grad_output self indices", _max_pool("adaptive_max_pool2d")),
    "adaptive_max_pool3d_backward": ("grad_output self indices", _max_pool("adaptive_max_pool3d")),
    "fractional_max_pool2d_backward": (f"grad_output {_FRACTIONAL} indices", _max_pool("fractional_max_pool2d")),
    "fractional_max_pool3d_backward": (f"grad_output {_FRACTIONAL} indices", _max_pool("fractional_max_pool3d")),
    "unfold_backward": ("grad_in input_sizes dim size step", _unfold),
    "_fft_c2c": ("self dim normalization forward", _fourier),
    "_fft_r2c": ("self dim normalization onesided", _fourier),
    "_fft_c2r": ("self dim normalization last_dim_size", _fourier),
    **_upsample_rules(),
}  # fmt: skip

TAKEN = {
    "max_pool2d_with_indices": _POOLED,
    "max_pool3d_with_indices": _POOLED,
    "adaptive_max_pool2d": "self output_size",
    "adaptive_max_pool3d": "self output_size",
    "fractional_max_pool2d": f"{_FRACTIONAL} random_samples",
    "fractional_max_pool3d": f"{_FRACTIONAL} random_samples",
}
"""Parameters of the operators whose indices another takes over."""
