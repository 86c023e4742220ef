"""Quantized models of other programs, decoded to directories of floats: GGUF files, bitsandbytes, GPTQ and AWQ."""
