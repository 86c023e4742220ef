"""Two devices come to trust each other: one shows a code, it is typed at the other."""
