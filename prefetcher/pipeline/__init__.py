"""Runs the stages of each step: planning, fetching rows, writing rows back."""
