"""Checkpoints that certify themselves, and checks that copies of the state agree."""
