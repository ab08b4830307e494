"""The samplers, one a file; `tfdml.data.sampling` is where to import them from."""
