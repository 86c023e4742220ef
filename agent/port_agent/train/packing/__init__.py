"""Storages of a step that wait packed in RAM for their next use, and what packing would take of those that do not yet."""
