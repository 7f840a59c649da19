"""Faults of this machine (`doctor`) and of the numbers of the recipes (`twins`)."""
