"""Measure what each operator costs on this device."""
