"""The profile on one GPU: rates that a GPU can have, in the time that it was given."""

import time

import pytest
import torch

from ds_usp.planner import load_cluster
from ds_usp.planner.__main__ import main

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.no_other_load  # it compares the host times of launches
def test_a_profile_of_this_gpu(tmp_path):
    out = tmp_path / "here.json"
    begin = time.monotonic()
    assert main(["profile", "--out", str(out), "--seconds", "15", "--model", "gpt-1.3b"]) == 0
    assert time.monotonic() - begin < 90  # with the start, and kernels that are compiled
    cluster = load_cluster(str(out))
    assert cluster.memory_bytes == torch.cuda.get_device_properties().total_memory
    for curve in (cluster.gemm_efficiency, cluster.attention_efficiency):
        assert 0.2 < max(share for _, share in curve) <= 1.1
    assert 1e11 < cluster.hbm_bytes_per_s < 2e13
    assert 1e9 < cluster.host_bytes_per_s < 2e11
    assert {row.tokens for row in cluster.layers} == {3072, 12288, 40960}
    for row in cluster.layers:  # more tokens, more time; backward takes longer than forward
        assert row.forward_s < row.backward_s < 4 * row.forward_s
    rows = (*cluster.layers, *cluster.calls)
    assert all(1e-5 < row.forward_host_s < 0.05 > row.backward_host_s > 1e-5 for row in rows)
    # A host launches, however much it is that the GPU then does: what the GPU takes longer must not
    # show in the host's time. Single launches differ by tenths of a millisecond on a shared CPU.
    few, *_, many = sorted(cluster.layers, key=lambda row: row.tokens)
    short, *_, long = sorted(cluster.calls, key=lambda row: row.seq_len)
    for small, large in ((few, many), (short, long)):
        assert large.forward_s > 4 * small.forward_s
        for direction in ("forward", "backward"):
            more, more_on_host = (
                getattr(large, f"{direction}{kind}") - getattr(small, f"{direction}{kind}")
                for kind in ("_s", "_host_s")
            )
            assert more_on_host < 0.05 * more
