"""Pairing, by which two devices come to trust each other: one shows a code, which is typed at the other."""
