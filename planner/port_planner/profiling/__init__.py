"""Measure the cost of each operator on this device."""
