"""Tests of models and trainers of other libraries, skipped where these are absent."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("transformers") else ["test_*.py"]
if not find_spec("diffusers"):  # which needs Python 3.11
    collect_ignore_glob.append("test_diffusers*.py")
