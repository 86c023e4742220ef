"""Devices on which a step's storages may be: their names, and their properties in torch."""
