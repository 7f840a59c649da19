"""Operations of a Transformer written by hand for TPU; models/forms.py has their plain forms."""
