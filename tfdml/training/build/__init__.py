"""From the settings of a run to the objects that it consists of."""
