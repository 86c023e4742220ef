"""From the files of a user to sequences of tokens."""
