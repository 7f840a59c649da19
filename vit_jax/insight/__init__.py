"""Tables and pictures that show what a model, a set of runs or this machine does."""
