"""What benchmarks run as compiled code: sources, and the way to compile and load them."""
