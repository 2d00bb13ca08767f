"""Moves messages through links and bytes through rings."""
