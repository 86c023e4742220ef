"""Packaging: what gets PORT agent onto a device, and from one version to the next."""
