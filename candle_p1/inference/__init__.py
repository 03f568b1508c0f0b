"""Applying a trained network to new samples; in one process, without MPI."""
