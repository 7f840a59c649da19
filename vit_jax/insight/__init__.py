"""Tables and figures that show what a model or a set of runs does."""
