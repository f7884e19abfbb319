"""The benchmark of megatron-core's training loop: its rows, on two CPU ranks."""

import pytest
from megatron_train import Workload
from programs import ROOT, torchrun
from tables import read

CONTENDERS = ["ds_usp 2x1 auto", "ds_usp 1x2 auto", "stock"]
SETTINGS = ("--device", "cpu", "--workloads", "tiny:64:2")
TINY = "tiny 2 layers 64 x 2"


def run(*arguments: str) -> str:
    """The output of the script on two ranks that torchrun starts; its patches end with them."""
    done = torchrun(2, ROOT / "scripts/bench/bench_megatron_lm.py", *SETTINGS, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_workload_is_a_model_its_first_layers_tokens_and_sequences():
    workload = Workload.parse("llama3-8b/8:64K:2")
    assert (workload.model.layers, workload.model.kv_heads) == (8, 8)
    assert (workload.seq_len, workload.sequences) == (65536, 2)
    assert str(workload) == "llama3-8b 8 layers 64K x 2"
    assert Workload.parse("tiny:100").sequences == 1
    batch = Workload.parse("tiny:100").batch(seed=1)
    assert batch["tokens"][0, 1:].equal(batch["labels"][0, :-1])


@pytest.mark.slow
def test_every_contender_is_timed_on_the_same_weights(tmp_path):
    path = tmp_path / "megatron_lm.csv"
    output = run("--warm-up", "1", "--iterations", "2", "--rounds", "2", "--out", str(path))
    rows = read(path)
    assert [row["contender"] for row in rows] == [f"{name}, local layers" for name in CONTENDERS]
    assert {row["workload"] for row in rows} == {TINY}
    for row in rows:
        seconds = float(row["ms"]) / 1e3
        assert float(row["tokens_per_s_per_gpu"]) == pytest.approx(64 * 2 / 2 / seconds, rel=0.01)
        assert float(row["loss"]) == pytest.approx(float(rows[-1]["loss"]), abs=1e-4)
        assert float(row["grad_norm"]) == pytest.approx(float(rows[-1]["grad_norm"]), abs=1e-4)
    assert output.count("tokens/s per GPU") == 3
