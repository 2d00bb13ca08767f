"""Holds what both processes need to run: threads, signals, errors, files, compiled loops, telemetry."""
