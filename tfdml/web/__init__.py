"""Models behind HTTP: TensorFlow Serving's REST API, and a page to try a model; needs the extra
`web`."""
