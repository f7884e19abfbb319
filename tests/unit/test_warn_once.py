"""Lines to the user: once, on one rank, through logging."""

from ds_usp.errors import warn_once


def test_a_line_is_said_once_and_on_rank_0_only(caplog):
    for text in ("no Triton, 100% torch", "no Triton, 100% torch", "no NVLink"):
        for rank in (1, 0, 0):
            warn_once(text, rank=rank)
    assert caplog.record_tuples == [
        ("ds_usp", 30, "no Triton, 100% torch"),
        ("ds_usp", 30, "no NVLink"),
    ]
