"""One module for each `data.format`, with what only that format needs."""
