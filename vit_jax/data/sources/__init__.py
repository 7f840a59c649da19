"""Sources of data, in files by kind. Plug-ins import from here what a source needs."""

from vit_jax.data.contract import DataSet, Request, Source, fingerprint, in_memory, numbered

__all__ = ["DataSet", "Request", "Source", "fingerprint", "in_memory", "numbered"]
