"""The code through which every operator passes: its traits, how it runs, and the memory that it takes."""
