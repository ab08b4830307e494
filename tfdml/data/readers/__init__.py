"""The data sets, one a file: each reads one official layout into an `ImageDataset`."""
