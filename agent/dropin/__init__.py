"""A RAM budget around a training loop that the user wrote, by recording one of its steps."""
