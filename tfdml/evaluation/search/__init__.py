"""Nearest neighbours: exact, through an index, and how much of the exact answer an index finds."""
