"""Fixtures of the kernel tests."""

from kernel_cases import subject
from stub_machine import machine

__all__ = ["machine", "subject"]
