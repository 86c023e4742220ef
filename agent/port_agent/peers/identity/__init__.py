"""Who this device is to others: a key pair, and an id that is the hash of its certificate."""
