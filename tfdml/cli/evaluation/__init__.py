"""The parts of `tfdml evaluate`: its flags, what a split measures, and searches of a gallery."""
