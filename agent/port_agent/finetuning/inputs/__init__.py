"""The inputs of a fine-tuning: its options, the files of its model, and the libraries that read them."""
