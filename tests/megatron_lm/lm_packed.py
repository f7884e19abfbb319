"""Conversations for ``--sft``, without the packages that read and tokenize them."""

from typing import Any

import numpy as np
import torch

END, PADDING, IGNORED = 255, 254, -100


def conversations(original: Any, dataset: Any, path: str) -> None:
    """``SFTLowLevelDataset.__init__``: samples of three conversations of several lengths."""
    generator = torch.Generator().manual_seed(0)

    def content() -> list[int]:
        length = int(torch.randint(3, 19, (), generator=generator))
        return torch.randint(2, 200, (length,), generator=generator).tolist()

    roles = [("system", lambda: [1]), ("user", content)]
    dataset.dataset = [
        {"messages": [{"role": role, "content": make()} for role, make in 3 * roles]}
        for _ in range(32)
    ]


def tokenizer(original: Any, args: Any) -> Any:
    """``build_tokenizer``: one that takes tokens for text."""
    return _Tokenizer(original(args))


class _Tokenizer:
    eod, pad = END, PADDING

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def tokenize_conversation(self, conversation: Any, **_: Any) -> tuple[Any, Any]:
        """Tokens and targets, the first two of which have no loss."""
        tokens = np.array([x for message in conversation for x in message["content"]])
        targets = tokens.copy()
        targets[:2] = IGNORED
        return tokens, targets


PATCHES = (
    ("megatron.training.datasets.sft_dataset:SFTLowLevelDataset.__init__", conversations),
    ("megatron.core.tokenizers.text.utils.build_tokenizer:build_tokenizer", tokenizer),
)
