"""Searching a gallery from a local web page; needs the extra `demo`."""
