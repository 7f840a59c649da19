"""What is wrong: with this machine (`doctor`), or with the numbers of the recipes (`twins`)."""
