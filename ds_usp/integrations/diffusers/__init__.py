"""Diffusion transformers and pipelines of diffusers on ulysses x ring, by :func:`enable`."""

from ds_usp.integrations.diffusers.backend import register_backend
from ds_usp.integrations.diffusers.model import EnabledTransformer, enable
from ds_usp.integrations.diffusers.plans import PLANS, Plan, TokenDim
from ds_usp.integrations.diffusers.vae import EnabledVAE, enable_vae

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
