"""This device's identity: a key pair, and an id that is the hash of its certificate."""
