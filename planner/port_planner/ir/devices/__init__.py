"""Devices that a step's storages may lie on: their names, and what torch says of each."""
