"""What says nothing of graphs, plans or devices: errors, units, times, this process's memory, input and output past the page cache."""
