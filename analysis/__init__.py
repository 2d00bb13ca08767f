"""The commands that answer questions about a job without training it."""
