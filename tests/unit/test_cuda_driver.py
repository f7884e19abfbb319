"""The CUDA driver, and what takes its place where it cannot be used."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from ds_usp.comm import copy_engine


@pytest.mark.parametrize(
    ("installed", "reason"),
    [
        (ImportError("No module named 'cuda'"), "cuda-bindings is missing"),
        (SimpleNamespace(cuDriverGetVersion=lambda: (34, 0)), "error 34"),  # a stub of it
        (SimpleNamespace(cuDriverGetVersion=lambda: (0, 11040)), "CUDA 11.4"),
        (SimpleNamespace(cuDriverGetVersion=lambda: (0, 11070)), "None"),
    ],
)
def test_copy_engines_are_off_where_the_driver_cannot_be_used(
    installed: object, reason: str
) -> None:
    copy_engine.driver.cache_clear()
    with (
        mock.patch.object(copy_engine, "import_module", side_effect=[None, installed]),
        mock.patch.object(torch.version, "cuda", "12.4"),
        mock.patch.object(torch.cuda, "device_count", lambda: 2),
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
        mock.patch.object(torch.cuda, "can_device_access_peer", lambda *_: True),
    ):
        assert reason in str(copy_engine.peer_copy_unavailable_reason(2))
    copy_engine.driver.cache_clear()
