"""Implements commands that analyse a job without training it."""
