"""Runs work on the device: streams and their clocks, page-locked memory."""
