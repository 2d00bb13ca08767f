"""Implements `rowcast advise`, which recommends a cache size."""
