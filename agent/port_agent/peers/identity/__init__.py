"""This device's identity for others: a key pair, and an id that is the hash of its certificate."""
