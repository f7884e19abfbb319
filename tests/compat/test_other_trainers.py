"""Other projects' own sequence parallelism with ds_usp's attention, as docs/usage/other-trainers.md
puts it there. ``scripts/test.sh compat`` has the projects; elsewhere these are skipped."""

from importlib.util import find_spec

import pytest

RUN_ON = 4


def rank_functions(project):
    if find_spec(project) is None:
        pytest.skip(f"{project} is not installed: scripts/test.sh compat has it")
    import other_trainers

    return other_trainers


@pytest.mark.parametrize("rows", [((9, 21, 16),), ((9, 21, 18),), ((46,), (30, -16))], ids=str)
def test_llama_factory_trains_as_one_process(pool, rows):
    runs = rank_functions("llamafactory")
    for error in pool.run(runs.llama_factory, RUN_ON, kind="gemma2", rows=rows, ulysses=2):
        assert error <= 1e-5


@pytest.mark.parametrize("rows", [((9, 21, 16),), ((48,),)], ids=str)
def test_swift_trains_as_one_process(pool, rows):
    runs = rank_functions("swift")
    for error in pool.run(runs.swift, RUN_ON, kind="llama", rows=rows, ulysses=2):
        assert error <= 1e-5
