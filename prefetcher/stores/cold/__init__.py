"""Keeps rows outside the prefetcher's memory."""
