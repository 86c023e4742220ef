"""The control socket's wire: HTTP, its client, and the metrics text."""
