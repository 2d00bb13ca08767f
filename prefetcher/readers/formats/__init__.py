"""Reads each `data.format` in a separate module."""
