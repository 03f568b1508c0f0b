"""A run's parameters: declared, read, frozen, each with its origin."""
