"""The job file: its keys and defaults, how it is read and checked, and the tables and groups that it describes."""
