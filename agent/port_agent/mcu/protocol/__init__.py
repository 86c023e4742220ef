"""The protocol of host and board over the serial line: frames, messages and sessions, with each effect exactly once."""
