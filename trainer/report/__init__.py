"""What a run leaves behind and shows: losses, report.json, report.html, TensorBoard files, the terminal."""
