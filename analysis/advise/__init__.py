"""Implements `prefetcher advise`, which recommends a cache size."""
