"""What both processes need to run and no message mentions: threads, signals, errors, files, compiled loops, telemetry."""
