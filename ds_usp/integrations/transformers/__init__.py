"""Models of Hugging Face transformers on ulysses x ring, by one call of :func:`enable`."""

from ds_usp.integrations.transformers.model import EnabledModel, enable

__all__ = ["EnabledModel", "enable"]
