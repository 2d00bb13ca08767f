"""Freezes, writes, restores, merges, exports and imports checkpoints."""
