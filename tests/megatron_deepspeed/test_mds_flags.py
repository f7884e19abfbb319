"""No flag of the host's is dropped in silence where sequences are spread over ranks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from host_flags import CLASSES, REFUSED, flags_of
from host_runs import HostServer, flags, numbers, relative_difference

from ds_usp.errors import ConfigError

SP2 = {"sp": 2, "u": 1, "zero": 1}
SHORT = "--train-iters 2 --micro-batch-size 1"
ROPE = "--use-rotary-position-embeddings"
# What each does to the loss of one rank it does to that of two.
CHANGES = (
    "--eod-mask-loss",
    "--reset-position-ids",
    f"{ROPE} --rotary-percent 0.5",
    f"{ROPE} --rotary-position-embeddings-theta 500",
    "--layernorm-epsilon 0.1",
    "--kv-channels 16",
    "--openai-gelu",
    "--no-position-embedding",
    "--dataloader-type cyclic",
    "--clip-grad 0.5",
)
CHANGES_NOTHING = (
    "--attention-softmax-in-fp32",
    "--no-query-key-layer-scaling",
    "--create-moe-param-group",
    "--empty-unused-memory-level 2",
    "--recompute-granularity selective",
    "--memory-centric-tiled-linear --tile-factor 2",
)


def test_the_table_holds_every_flag_once(checkout: Path) -> None:
    known = Counter(name for names in CLASSES.values() for name in names)
    assert not [name for name, times in known.items() if times > 1]
    found = flags_of(checkout)
    assert not [names for names in found if not known.keys() & set(names)]
    assert not known.keys() - {name for names in found for name in names}


@pytest.mark.parametrize("flag", REFUSED)
def test_a_flag_that_cannot_be_obeyed_is_refused(host: HostServer, flag: str) -> None:
    for seen in host.attempt(2, flags(more=f"{flag} {REFUSED[flag]}", **SP2)):
        assert isinstance(seen.get("refused"), ConfigError), seen
        assert not seen["groups"]


@pytest.mark.parametrize("more", [*CHANGES, *CHANGES_NOTHING])
def test_a_flag_does_what_it_does_on_one_rank(host: HostServer, more: str) -> None:
    plain, one = (
        numbers(host.run(1, flags(zero=1, more=f"{SHORT} {words}"))) for words in ("", more)
    )
    two = numbers(host.run(2, flags(more=f"{SHORT} {more}", **SP2)))
    assert relative_difference(two, one) < 1e-5
    assert (relative_difference(one, plain) > 1e-6) == (more in CHANGES)
