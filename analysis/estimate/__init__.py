"""Estimates the time of a step, by scheduling the pipeline's tasks on its threads."""
