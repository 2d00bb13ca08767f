"""Measures next-item models: docs/sequences.md has the figures."""
