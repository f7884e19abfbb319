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


RING_FLASH_ATTN = {
    "openrlhf": (("gemma2", ((48,), (-18, 30))), ("gpt_oss", ((30, -18),))),
    "axolotl": (("gemma2", ((9, 21, 18),)), ("gpt_oss", ((48,),))),
    "prime_rl": (("gemma2", ((9, 21, 18),)), ("gpt_oss", ((9, 21, 18),))),
}


@pytest.mark.parametrize("project", RING_FLASH_ATTN)
def test_importers_of_ring_flash_attn_train_as_one_process(pool, project):
    if project == "prime_rl" and find_spec("torchtitan") is None:
        pytest.skip(
            "prime-rl is on no index: PYTHONPATH= its checkout's src and "
            "packages/prime-rl-configs/src, its torchtitan, and triton, tyro, docstring_parser, "
            "protobuf, absl-py, flash-linear-attention, fla-core, prime-pydantic-config"
        )
    runs = rank_functions(project)
    for kind, rows in RING_FLASH_ATTN[project]:
        for error in pool.run(getattr(runs, project), RUN_ON, kind=kind, rows=rows, ulysses=2):
            assert error <= 1e-5, kind
