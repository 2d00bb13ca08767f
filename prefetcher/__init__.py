"""The CPU side: reads batches ahead, plans which rows are on the device when, and moves the rows."""
