"""The paired devices: their identities, addresses and activities."""
