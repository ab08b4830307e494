"""The processes and devices that train together."""
