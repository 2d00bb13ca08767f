"""One file a question. Each says what it asks, how, and prints a table."""
