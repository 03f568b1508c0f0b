"""What benchmarks build their networks from, and judge them by."""
