"""Models of Hugging Face transformers on ulysses x ring, by one call of :func:`enable`."""

from ds_usp.errors import require_package

require_package("transformers", __name__)

from ds_usp.integrations.transformers.alst import (  # noqa: E402
    UlyssesSPAttentionHF,
    UlyssesSPDataLoaderAdapter,
    patch_accelerate,
    sequence_mesh,
)
from ds_usp.integrations.transformers.model import EnabledModel, enable  # noqa: E402
from ds_usp.integrations.transformers.replicated_accelerator import share_batches  # noqa: E402
from ds_usp.integrations.transformers.trainer import attach, replicate_batches  # noqa: E402

__all__ = [
    "EnabledModel",
    "UlyssesSPAttentionHF",
    "UlyssesSPDataLoaderAdapter",
    "attach",
    "enable",
    "patch_accelerate",
    "replicate_batches",
    "sequence_mesh",
    "share_batches",
]
