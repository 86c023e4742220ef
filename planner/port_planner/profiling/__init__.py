"""What each operator costs on this device."""
