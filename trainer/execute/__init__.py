"""Executes plans: the main loop, the device cache, streams, and copies between host and device."""
