"""Compile PyTorch models for microcontrollers that train: int8, in place, within a fixed arena.

Follows "On-Device Training Under 256KB Memory" (arXiv 2206.15472); where the numbers differ, the module says so.

    model = compile_model(module, calibration, scheme=last_layers(...), budget=64 * 1024)
    model.write("build/model")        # model.h and model.c for the firmware
"""

from port_planner.mcu.autodiff import LayerUpdate, SparseScheme, full_scheme, last_layers
from port_planner.mcu.compile import CompiledModel, compile_model, compile_quantized
from port_planner.mcu.host import (
    HostEngine,
    UpdateOptions,
    UpdateRounding,
    build_library,
    engine_sources,
    firmware_root,
)
from port_planner.mcu.ir import Loss, McuCompileError
from port_planner.mcu.memory import ArenaBudgetError
from port_planner.mcu.onnx_import import read_onnx
from port_planner.mcu.tflite_import import read_tflite

__all__ = [
    "ArenaBudgetError",
    "CompiledModel",
    "HostEngine",
    "LayerUpdate",
    "Loss",
    "McuCompileError",
    "SparseScheme",
    "UpdateOptions",
    "UpdateRounding",
    "build_library",
    "compile_model",
    "compile_quantized",
    "engine_sources",
    "firmware_root",
    "full_scheme",
    "last_layers",
    "read_onnx",
    "read_tflite",
]
