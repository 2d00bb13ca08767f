"""Links that carry messages and rings that carry bytes."""
