"""Start of a run of the script that runs as ``__main__``, whose functions are patched later."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

FRAMEWORK = "megatron_deepspeed"
SCRIPT = "__main__"


def pretrain(
    original: Callable[..., Any],
    train_valid_test_dataset_provider: Any,
    model_provider: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Wrapper of ``training.pretrain``: looks up the script's ``model_provider`` by its name when
    a model is built."""
    # The script passes it before it is patched (by arguments.validate_args, inside the original). A
    # provider that its module does not have under its name is called as it is.
    script = sys.modules.get(getattr(model_provider, "__module__", SCRIPT))
    name = getattr(model_provider, "__name__", "")

    def provide(*args: Any, **kwargs: Any) -> Any:
        return getattr(script, name, model_provider)(*args, **kwargs)

    return original(train_valid_test_dataset_provider, provide, *args, **kwargs)
