"""Saved traces: the ids of every batch and the plans made for them, for replay."""
