"""From a user's files to sequences of tokens."""
