"""The operating system's side: control groups, locks, clocks, atomic files, kernel events."""
