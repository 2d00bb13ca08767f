"""Implements `rowcast new`, which writes a job file for data."""
