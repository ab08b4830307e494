"""Commands for maintainers, run in a checkout as `python -m tools.NAME`. The wheel does not contain
them."""
