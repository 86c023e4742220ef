"""A drawing of two operators."""

from port_planner.draw.drawing import Bar, Drawing, Shade, Span

PICTURE = Drawing(
    lanes=(("hidden", 2048),), bars=(Bar(0, 0, 2, Shade.KEEP),), memory=(1024, 3072), moments=(0.0, 0.5, 1.0),
    budget_bytes=4096, title="two operators", operators=("addmm", "relu"), phases=(Span("forward", 0, 2),),
    figures=(("peak", "3.0 KiB"),), base_bytes=512, unshown=7,
)  # fmt: skip
