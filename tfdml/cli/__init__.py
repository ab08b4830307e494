"""What the commands in `bin/` call."""
