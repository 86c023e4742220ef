"""Pairing, which makes two devices trust each other: one shows a code, which a person types at the other."""
