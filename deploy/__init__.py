"""Starting both processes on one host, and what containers need."""
