"""Unchanged public programs."""
