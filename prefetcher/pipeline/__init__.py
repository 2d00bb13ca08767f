"""The stages that each step passes: planning, fetching rows, writing rows back."""
