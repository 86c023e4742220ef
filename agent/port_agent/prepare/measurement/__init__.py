"""The process that measures operators and compares tiles, alongside the one that plans."""
