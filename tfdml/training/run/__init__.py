"""One run of an experiment, from its first step to its results."""
