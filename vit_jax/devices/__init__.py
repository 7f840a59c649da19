"""Devices: chips and their peaks, the mesh, sharding, compiler options, FLOPs."""
