"""Values and gradients of other libraries, live: their environments are made by `make parity-pml`
and its like."""
