"""Turns data files into batches in training order, in separate processes."""
