"""The group of the engine that runs."""

_GROUPS = [None]


def set_ulysses_sequence_parallel_group(group):
    _GROUPS[0] = group


def get_ulysses_sequence_parallel_group():
    return _GROUPS[0]
