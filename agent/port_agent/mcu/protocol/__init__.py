"""The protocol of host and board over the serial line: frames, messages, sessions, each effect exactly once."""
