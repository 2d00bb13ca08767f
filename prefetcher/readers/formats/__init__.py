"""One module per `data.format`, with what only that format needs."""
