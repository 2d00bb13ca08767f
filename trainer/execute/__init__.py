"""Executes plans: the main loop, the device cache, the streams and the copies between host and device."""
