"""Devices that a step's storages may lie on: their names and their properties in torch."""
