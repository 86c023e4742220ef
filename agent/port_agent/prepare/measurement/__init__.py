"""The process that measures operators and compares tiles for the planning process."""
