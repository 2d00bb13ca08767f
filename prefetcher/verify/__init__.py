"""`--verify`: checksums of every row that leaves for the device and comes back."""
