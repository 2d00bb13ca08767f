"""Checkpoints: taken at a barrier, written while training continues, restored, merged, exported and imported."""
