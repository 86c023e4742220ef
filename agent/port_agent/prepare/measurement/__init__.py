"""The process that measures operators and compares tiles, beside the one that plans."""
