"""`rowcast check`: compares a job file with its data and this machine."""
