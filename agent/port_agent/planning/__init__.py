"""From a training script to a bundle: the request (`request`), and how the bundle is made (`plan_making`)."""
