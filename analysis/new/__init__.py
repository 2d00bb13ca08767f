"""Implements `prefetcher new`, which writes a job file for data."""
