"""Implements `rowcast profile`, which finds the most looked-up rows and what pinning them would cover."""
