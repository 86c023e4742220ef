"""Networks and float training that the microcontroller benchmarks compare with."""
