"""Tests of transformers' models and trainers, skipped as a folder where transformers is absent."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("transformers") else ["test_*.py"]
