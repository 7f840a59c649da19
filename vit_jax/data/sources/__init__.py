"""Sources of data, one file each; a plug-in finds here what it needs for its own."""

from vit_jax.data.contract import DataSet, Request, Source, fingerprint, in_memory, numbered

__all__ = ["DataSet", "Request", "Source", "fingerprint", "in_memory", "numbered"]
