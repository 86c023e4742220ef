"""Public programs as they are."""
