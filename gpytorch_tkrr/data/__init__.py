"""Rows: where they come from, which processes share them, how far a fit has come."""
