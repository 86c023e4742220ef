"""Quantized models of other programs (GGUF files, bitsandbytes, GPTQ and AWQ), decoded to directories
with floating-point weights.
"""
