"""Devices: chips and their peaks, the mesh, the layout of arrays, compiler options, FLOPs."""
