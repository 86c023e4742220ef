"""Jobs as the owner sees them: their model, and the store that survives a power cut."""
