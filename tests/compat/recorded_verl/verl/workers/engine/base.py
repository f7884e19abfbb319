"""What every engine has."""

from verl.utils.ulysses import set_ulysses_sequence_parallel_group


class BaseEngineCtx:
    """Where an engine runs; the engine of FSDP sets its group in it."""

    def __init__(self, engine, mode, **kwargs):
        self.engine = engine

    def __enter__(self):
        set_ulysses_sequence_parallel_group(self.engine.ulysses_parallel_group)

    def __exit__(self, exc_type, exc_val, exc_tb):
        set_ulysses_sequence_parallel_group(None)
