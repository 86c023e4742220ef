"""From a training script to a bundle: what is asked for (`request`), and how it is made (`making`)."""
