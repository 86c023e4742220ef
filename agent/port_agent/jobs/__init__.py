"""Jobs as the owner sees them: their model, and a store that survives a power cut."""
