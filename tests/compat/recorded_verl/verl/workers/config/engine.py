"""The config of an engine."""

from dataclasses import dataclass


@dataclass
class FSDPEngineConfig:
    """Of the fields those that the recorded engine reads."""

    strategy: str = "fsdp"
    ulysses_sequence_parallel_size: int = 1
