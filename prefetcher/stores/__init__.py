"""Where the rows live: one store for each group of tables."""
