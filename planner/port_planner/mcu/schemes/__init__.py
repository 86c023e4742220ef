"""What a board trains: what each layer's training gains, the best sets within its memory, and which one pays per joule."""
