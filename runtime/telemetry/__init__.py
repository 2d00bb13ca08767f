"""Reports on a process: metrics and health over HTTP, logs, the timeline, build information."""
