"""Stores of rows, one per group of tables."""
