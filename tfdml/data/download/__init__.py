"""Fetching data sets from their publishers: transfers that resume, archives, checksums."""
