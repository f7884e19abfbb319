"""What all tests on GPUs share."""

from __future__ import annotations

import os

# FlashAttention-4 compiles a kernel for every kind of call, in every process: half of the time.
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
