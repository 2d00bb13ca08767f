"""Shows and keeps a run's results: losses, report.json, report.html, TensorBoard files, the terminal."""
