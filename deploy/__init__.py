"""Starts both processes on one host; files for containers, Prometheus and Grafana."""
