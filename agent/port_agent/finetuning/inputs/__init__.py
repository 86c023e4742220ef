"""What a fine-tuning is given: its options, the files of its model, and the libraries that read them."""
