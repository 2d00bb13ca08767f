"""Decides which rows are on the device at every step. Pure: no I/O, no threads, no clock."""
