"""The control socket's wire: HTTP, its client, and the metrics text."""

PATIENCE_S = 30.0
"""Seconds to wait for an answer of the agent."""
