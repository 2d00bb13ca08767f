"""From data files to batches in training order, decoded by processes of their own."""
