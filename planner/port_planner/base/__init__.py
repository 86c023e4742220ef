"""What says nothing of graphs, plans or devices: errors, units, times, bounds, the user's cache, this process's memory, input and output past the page cache."""
