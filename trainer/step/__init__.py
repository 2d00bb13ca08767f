"""Executes plans, step by step: the main loop, the device cache, and copies between host and device."""
