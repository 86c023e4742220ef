"""Jobs that move to a paired device and come back: the owner's side and the side of the device that takes them."""
