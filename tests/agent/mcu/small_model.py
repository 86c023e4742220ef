"""A model small enough to write by hand: one classifier, all of it trained. No torch, no compiler of models."""

import hashlib
import random
from pathlib import Path

INPUTS, CLASSES = 24, 4
PARAMETER_BYTES = 4 * CLASSES + CLASSES * INPUTS
FAULT = "(const float *)0x70000000"
"""Where no board here has anything: a read is a bus fault."""
HANG = "{ .kind = PORT_OP_MAX_POOL, .kernel_h = 1, .kernel_w = 1, .out_h = 65535, .out_w = 65535 },"
"""Four thousand million turns of a loop that does nothing, in one step: longer than any watchdog waits."""


def write_model(
    folder: Path, name: str = "small", extra_arena_bytes: int = 0, extra_inputs: int = 0, broken: str = ""
) -> Path:
    """Write model.c and model.h into `folder` and return it; `broken` is "", "fault" or
    "hang": what INFER then does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    inputs = INPUTS + extra_inputs
    rng = random.Random(name)
    weights = [rng.randrange(-40, 40) & 0xFF for _ in range(CLASSES * inputs)]
    image = [0] * (4 * CLASSES) + weights
    at, head = (inputs + 7) // 8 * 8, int(broken == "hang")
    arena = at + 4 * CLASSES + extra_arena_bytes
    scale = "" if broken == "fault" else f"static const float scale[] = {{ {', '.join(['0.02f'] * CLASSES)} }};"
    digest = hashlib.sha256(repr((name, arena, image)).encode()).digest()
    (folder / "model.h").write_text(
        "#ifndef PORT_MODEL_GENERATED_H\n#define PORT_MODEL_GENERATED_H\n"
        '#include "port_model.h"\n'
        f"#define PORT_MODEL_ARENA_BYTES {arena}\n"
        f"#define PORT_MODEL_PARAMETER_BYTES {len(image)}\n"
        f"#define PORT_MODEL_INPUT_BYTES {inputs}\n"
        f"#define PORT_MODEL_CLASS_COUNT {CLASSES}\n"
        f'#define PORT_MODEL_NAME "{name}"\n'
        "extern const port_model port_generated_model;\n#endif\n"
    )
    (folder / "model.c").write_text(
        f"""#include "model.h"
static const uint8_t image[] __attribute__((aligned(8))) = {{ {", ".join(map(str, image))} }};
{scale}
static const port_op ops[] = {{ {HANG if broken == "hang" else ""} {{
    .kind = PORT_OP_CLASSIFIER, .kernel_h = 1, .kernel_w = 1, .stride_h = 1, .stride_w = 1, .in_h = 1, .in_w = 1,
    .in_c = {inputs}, .out_h = 1, .out_w = 1, .out_c = {CLASSES}, .trained_rows = {CLASSES},
    .out_min = -128, .out_max = 127,
    .weight_offset = {4 * CLASSES}, .bias_offset = 0, .q88_offset = PORT_NONE, .weight_scale = {FAULT if broken == "fault" else "scale"}, .in_scale = 0.05f,
}} }};
static const port_step steps[] = {{
    {"{PORT_STEP_FORWARD, 0, 0, 0, 65535, 0, PORT_NONE, 0, PORT_NONE, PORT_NONE, PORT_NONE, PORT_NONE}," if broken == "hang" else ""}
    {{PORT_STEP_FORWARD, 0, {head}, 0, 1, 0, PORT_NONE, {at}, PORT_NONE, PORT_NONE, PORT_NONE, PORT_NONE}},
    {{PORT_STEP_LOSS, 0, {head}, 0, 1, PORT_NONE, PORT_NONE, PORT_NONE, PORT_NONE, {at}, PORT_NONE, PORT_NONE}},
    {{PORT_STEP_WEIGHT, 0, {head}, 0, 1, 0, PORT_NONE, PORT_NONE, PORT_NONE, {at}, PORT_NONE, PORT_NONE}},
    {{PORT_STEP_BIAS, 0, {head}, 0, 1, PORT_NONE, PORT_NONE, PORT_NONE, PORT_NONE, {at}, PORT_NONE, PORT_NONE}},
}};
const port_model port_generated_model = {{
    .abi = PORT_ENGINE_ABI, .hash = {{ {", ".join(map(str, digest))} }}, .name = "{name}",
    .arena_bytes = {arena}, .parameter_bytes = {len(image)}, .input_offset = 0, .input_bytes = {inputs},
    .logits_offset = {at}, .class_count = {CLASSES}, .op_count = {head + 1}, .forward_count = {head + 1},
    .step_count = {head + 4}, .has_q88 = 0,
    .ops = ops, .steps = steps, .parameters = image,
}};
"""
    )
    return folder


def make_samples(count: int, seed: int = 0) -> tuple[list[bytes], list[int]]:
    """Return int8 samples of four noisy prototypes, and their classes."""
    rng = random.Random(seed)
    prototypes = [[rng.randrange(-90, 90) for _ in range(INPUTS)] for _ in range(CLASSES)]
    labels = [rng.randrange(CLASSES) for _ in range(count)]
    samples = [
        bytes((max(-128, min(127, value + rng.randrange(-30, 30)))) & 0xFF for value in prototypes[label])
        for label in labels
    ]
    return samples, labels
