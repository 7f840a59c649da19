"""Operations of a Transformer written by hand for TPU; block_ops.py has the plain forms."""
