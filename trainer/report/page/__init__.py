"""Makes `report.html`: charts and tables of one run on one self-contained page."""
