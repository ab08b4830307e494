"""Watching a run: what is measured of a sampled batch, and the alarms that are raised from it."""
