"""`port-agent mcu`: models on microcontrollers over a serial port."""
