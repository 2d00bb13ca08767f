"""Common code of both processes: threads, signals, errors, files, compiled loops, telemetry."""
