"""Machines and how jobs are launched on them."""
