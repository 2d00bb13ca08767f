"""Defines the job file: its keys and defaults, how it is read and checked, and the tables and groups it describes."""
