"""The paired devices: which they are, where they are, and what they do."""
