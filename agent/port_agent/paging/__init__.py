"""Pages of storages: the page thread, its files, and the regions in them that outlive a step."""
