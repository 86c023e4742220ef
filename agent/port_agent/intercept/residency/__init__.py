"""What is resident: storages, the operands of operators, evictions and reads, and the page file."""
