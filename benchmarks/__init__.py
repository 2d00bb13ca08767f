"""One file per question. Each states the question and the method, and prints a table."""
