"""The error of this package."""


class ModelError(ValueError):
    """A model, tokenizer or adapter that cannot be used; the message says which and what to do."""
