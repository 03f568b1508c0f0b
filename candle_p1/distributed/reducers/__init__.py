"""What averages the gradients of several ranks."""
