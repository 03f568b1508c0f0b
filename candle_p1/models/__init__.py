"""What benchmarks build their networks from, and evaluate them with."""
