"""Implements `--verify`: checksums of rows that leave for the device and come back."""
