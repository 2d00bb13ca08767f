"""What a process tells about itself: metrics and health over HTTP, logs, build information."""
