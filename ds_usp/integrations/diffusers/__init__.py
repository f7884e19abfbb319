"""Diffusion transformers and pipelines of diffusers on ulysses x ring, by :func:`enable`."""

from ds_usp.errors import require_package

require_package("diffusers", __name__)

from ds_usp.integrations.diffusers.backend import register_backend  # noqa: E402
from ds_usp.integrations.diffusers.model import EnabledTransformer, enable  # noqa: E402
from ds_usp.integrations.diffusers.plans import PLANS, Plan, TokenDim  # noqa: E402
from ds_usp.integrations.diffusers.vae import EnabledVAE, enable_vae  # noqa: E402

__all__ = [
    "PLANS",
    "EnabledTransformer",
    "EnabledVAE",
    "Plan",
    "TokenDim",
    "enable",
    "enable_vae",
    "register_backend",
]
