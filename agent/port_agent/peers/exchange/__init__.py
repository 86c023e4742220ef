"""What paired devices ask each other for, by content hash: questions, answers, and the files that are shared."""
