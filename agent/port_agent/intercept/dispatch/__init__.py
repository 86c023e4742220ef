"""Where every operator passes: what is known of it, how it runs, and the memory that it takes."""
