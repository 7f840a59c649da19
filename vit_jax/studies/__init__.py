"""Studies: experiments of several runs that depend on each other's results.

A study is one module, which declares a `Study` (engine.py), and one line in config/registries.py.
Its members are ordinary training runs, started by running.py.
"""
