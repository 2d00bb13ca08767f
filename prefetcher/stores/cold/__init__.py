"""Rows outside of the prefetcher's memory."""
