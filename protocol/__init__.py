"""What the prefetcher and the trainer agree on: the job file, plans, messages, transport. Imports neither of them."""
