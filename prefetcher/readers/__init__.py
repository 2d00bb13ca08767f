"""Turns data files into batches in training order, in processes of their own."""
