"""A connection to a paired device: TLS 1.3 with pinned certificates, messages with caps, nothing before trust."""
