"""What is resident: storages, what operators read of them, what leaves and comes back, and the page file."""
