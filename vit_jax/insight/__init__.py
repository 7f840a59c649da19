"""Tables and pictures that show what a model, a set of runs or this machine does.

`twins`, `trace` and `reference` compare short runs of the recipes with stored numbers.
"""
