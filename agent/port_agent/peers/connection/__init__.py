"""A connection to a paired device: TLS 1.3 with pinned certificates, limited messages, and nothing before trust."""
