"""Settings of property tests: the same examples in every run, and no time limit on an example."""

from hypothesis import settings


def examples(count: int) -> settings:
    """Decorate a ``@given`` test to run on so many examples."""
    return settings(max_examples=count, deadline=None, derandomize=True, database=None)
