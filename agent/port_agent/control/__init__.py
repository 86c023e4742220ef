"""The protocol of the control socket: HTTP, its client, and the metrics text."""

PATIENCE_S = 30.0
"""Seconds to wait for an answer from the agent."""
