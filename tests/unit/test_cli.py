"""The command line ``ds-usp``: dispatch, env, the flags of verify, and verify's own oracle."""

import json
import math
import os
import signal
import sys
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest
import torch
from programs import python

import ds_usp
from ds_usp import __main__ as program
from ds_usp import _version
from ds_usp.cli import environment, verify
from ds_usp.cli.verify import TensorErrors, VerifyCase, build_parser, cases_of
from ds_usp.config import TorchrunEnv

ROOT = Path(__file__).resolve().parents[2]
SHA = "0123456789abcdef0123456789abcdef01234567"


# ------------------------------------------------------------------ dispatch and version


def test_help_version_and_the_planner_start_without_torch():
    probe = (
        "import sys; from ds_usp.__main__ import main\n"
        "memory = 'memory --model gpt-1.3b --seq-len 8K'.split()\n"
        "codes = [main(['--help']), main(['--version']), main(memory), main(['verfy'])]\n"
        "print(codes, 'torch' in sys.modules)"
    )
    done = python("-c", probe)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 2] False"
    assert done.stderr.startswith("error: unknown command 'verfy' (did you mean verify?)")
    for command in ("env", "verify", "plan", "memory", "max-length"):
        assert f"\n  {command} " in done.stdout


def test_version_has_the_commit_between_releases(capsys, monkeypatch):
    assert program.main(["--version"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"ds-usp {ds_usp.__version__} (commit ")
    monkeypatch.setattr(_version, "BASE", "0.2.0.dev0")
    assert _version.version(SHA) == f"0.2.0.dev0+g{SHA[:9]}"
    assert _version.version(None) == "0.2.0.dev0"
    monkeypatch.setattr(_version, "BASE", "0.2.0")
    assert _version.version(SHA) == "0.2.0"


def test_commit_is_read_from_a_build_or_from_git_without_git(tmp_path):
    package, git = tmp_path / "ds_usp", tmp_path / ".git"
    package.mkdir()
    assert _version.commit(package) is None
    git.mkdir()
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert _version.commit(package) is None  # no commit yet
    (git / "packed-refs").write_text(f"# pack-refs\n{SHA} refs/heads/main\n")
    assert _version.commit(package) == SHA
    (git / "refs/heads").mkdir(parents=True)
    (git / "refs/heads/main").write_text("f" * 40 + "\n")
    assert _version.commit(package) == "f" * 40
    (git / "HEAD").write_text(f"{SHA}\n")
    assert _version.commit(package) == SHA
    (package / _version.COMMIT_FILE).write_text("a" * 40 + "\n")  # a build knows better
    assert _version.commit(package) == "a" * 40


def test_commit_of_a_worktree(tmp_path):
    git = tmp_path / "main/.git"
    (git / "worktrees/w").mkdir(parents=True)
    (git / "refs/heads").mkdir(parents=True)
    (git / "refs/heads/topic").write_text(f"{SHA}\n")
    (git / "worktrees/w/HEAD").write_text("ref: refs/heads/topic\n")
    (git / "worktrees/w/commondir").write_text("../..\n")
    (tmp_path / "w/ds_usp").mkdir(parents=True)
    (tmp_path / "w/.git").write_text(f"gitdir: {git}/worktrees/w\n")
    assert _version.commit(tmp_path / "w/ds_usp") == SHA


# ------------------------------------------------------------------ env


def test_env_prints_what_a_bug_report_needs(monkeypatch):
    lines: list[str] = []
    secrets = "DS_API_KEY", "TORCH_HUB_TOKEN", "USP_PASSWORD", "NCCL_SECRET_FILE"
    for name in (*secrets, "USP_MAX_TOKENS"):
        monkeypatch.setenv(name, "hunter2")
    assert environment.main(["--json"], lines.append) == 0
    facts = json.loads(lines[0])
    assert facts["ds_usp"]["version"] == ds_usp.__version__
    assert facts["versions"]["torch"] in torch.__version__
    assert facts["kernels"]["eager"] == "can run"
    if not torch.cuda.is_available():
        assert "needs a GPU of compute capability 9.0" in facts["kernels"]["flash4"]
        assert facts["copy_engines"] == {"usable": "no", "reason": "no NVIDIA GPU"}
    assert str(facts["system"]["torch_version"]) == torch.__version__
    shown = {name for name, value in facts["variables"].items() if value == "hunter2"}
    assert shown == {"USP_MAX_TOKENS"} and facts["variables"].keys() > {*secrets}
    text = environment.as_text(facts)
    for section in facts:
        assert f"\n{section}\n" in f"\n{text}\n"


def test_env_survives_missing_and_broken_libraries(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    versions = environment.collect()["versions"]
    assert versions["loaded by torch"].endswith("cuDNN 91900")
    assert {type(version) for version in versions.values()} <= {str, type(None)}
    monkeypatch.setitem(sys.modules, "torch", None)  # its import fails
    monkeypatch.setenv("PATH", "")  # neither git nor nvidia-smi
    facts = environment.collect()
    assert facts["versions"]["loaded by torch"].startswith("cannot be read: ModuleNotFoundError")
    assert facts["versions"]["torch"] == metadata.version("torch")
    for section in ("gpus", "links", "kernels", "copy_engines"):
        assert facts[section].startswith("cannot be read: ")
    assert environment.as_text(facts)


def test_env_says_the_version_that_is_imported(tmp_path, monkeypatch):
    """The first on the path, also beside what a broken installation has left; and what of the
    extras is absent or of another version than the extras say."""
    extras = ("trl>=2", "datasets>=4", "flash_attn_4>=4.0.0b36", "torch>=2.6", "ruff>=99")
    needed = "".join(f"Requires-Dist: {x}\n" for x in extras)
    for folder, text in (
        ("1/trl-2.5.dist-info", "Name: trl\nVersion: 2.5\n"),
        ("1/~rl-2.dist-info", ""),
        ("2/trl-1.5.dist-info", "Name: trl\nVersion: 1.5\n"),
        ("2/datasets-0.1.dist-info", "Name: datasets\nVersion: 0.1\n"),
        ("1/ds_usp-0.dist-info", f"Name: ds-usp\nVersion: 0\n{needed}"),
    ):
        (tmp_path / folder).mkdir(parents=True)
        if text:
            (tmp_path / folder / "METADATA").write_text(f"Metadata-Version: 2.1\n{text}")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "1"), str(tmp_path / "2"), *sys.path])
    versions = environment.collect()["versions"]
    assert (versions["trl"], versions["datasets"]) == ("2.5", "0.1")
    assert versions["not as required"] == "datasets 0.1, not >=4"
    assert versions["not installed"] == "flash_attn_4"
    assert versions["torch"] == metadata.version("torch")


def test_env_shows_the_variables_that_change_what_runs(monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("A_SECRET_TOKEN", "x")
    variables = environment.collect()["variables"]
    assert variables["NCCL_P2P_DISABLE"] == "1" and "A_SECRET_TOKEN" not in variables


# ------------------------------------------------------------------ the flags of verify


def cases(*argv: str, world: int | None = None, gpu: bool = False) -> list[VerifyCase]:
    return cases_of(build_parser().parse(argv), world, gpu)


def test_flags_become_a_case_on_each_split():
    split = "--ulysses", "2", "--ring", "2"
    (case,) = cases(*split, "--seq-len", "4K", "--window", "1K", "--heads", "6", "--forward-only")
    assert (case.seq_len, case.mask, case.heads, case.kv_heads) == (4096, (1024, 0), 6, 6)
    assert (case.ulysses, case.ring, case.dtype, case.backward) == (2, 2, "fp32", False)
    sizes = cases("--seq-len", "1M", "--mask", "full", "--heads", "2")
    assert [(x.ulysses, x.ring) for x in sizes] == [(1, 4), (2, 2)]  # and not 4: there are 2 heads
    assert {(x.seq_len, x.mask, x.layout) for x in sizes} == {(2**20, (None, None), "zigzag")}
    (packed,) = cases("--ring", "4", "--documents", "60,7")  # nothing else fits them
    assert (packed.ulysses, packed.ring, packed.seq_len, packed.borders) == (1, 4, 67, (0, 60, 67))
    (under_torchrun,) = cases("--ulysses", "4", world=8, gpu=True)
    assert (under_torchrun.ring, under_torchrun.dtype) == (2, "bf16")


def test_no_flags_are_a_sweep_over_all_degrees():
    sweep = cases("--seed", "3")
    assert len(sweep) == 18 and {case.seed for case in sweep} == {3}
    assert {(case.ulysses, case.ring) for case in sweep} == {(4, 1), (2, 2), (1, 4)}
    for world in (1, 2, 6, 64):
        for gpu in (False, True):
            for case in cases(world=world, gpu=gpu):
                assert case.ulysses * case.ring == world and case.heads % case.kv_heads == 0


@pytest.mark.parametrize(
    ("argv", "world", "message"),
    [
        (["--seq-lenght", "64"], None, "unknown argument --seq-lenght (did you mean --seq-len?)"),
        (["--heads", "0"], None, "'0' must be a whole number of 1 or more"),
        (["--ulysses", "5", "--ring", "5"], None, "= 25 ranks; a plain start forks at most 16"),
        (["--ulysses", "3"], 8, "does not divide the 8 ranks that torchrun started. Use one of 8"),
        (["--ulysses", "2", "--ring", "2"], 8, "= 4 is not the 8 ranks that torchrun started"),
        (["--seq-len", "64", "--documents", "60,5"], None, "are 65 tokens, --seq-len is 64"),
    ],
)
def test_bad_flags_are_one_line(argv, world, message):
    with pytest.raises(ds_usp.ConfigError) as refused:
        cases_of(build_parser().parse(argv), world, False)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_bad_flags_exit_with_2(capsys):
    assert program.main(["verify", "--sek-len", "64"]) == 2
    assert capsys.readouterr().err.startswith("error: ds-usp verify: unknown argument --sek-len")


def test_one_rank_of_a_node_says_the_error(monkeypatch, capsys):
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        for argv in (["verify", "--hedas", "4"], ["plan", "--gpsu", "4"]):
            assert program.main(argv) == 2
            assert capsys.readouterr().err.count("\n") == lines


def test_what_does_not_fit_is_refused_before_it_is_taken(monkeypatch, capsys):
    """With the numbers; README's command took all of a machine's memory."""
    monkeypatch.setattr(verify, "free_memory", lambda: 20.0 * 2**30)
    monkeypatch.setattr(verify, "run_forked", lambda *_: pytest.fail("it was started"))
    command = ["verify", "--ulysses", "4", "--ring", "2", "--seq-len", "32K", "--heads", "32"]
    assert program.main(command) == 2
    line = capsys.readouterr().err
    assert "8 ranks x 5.6 GiB = 45.0 GiB of host memory, of which 20.0 GiB are free" in line
    case = VerifyCase(4, 2, seq_len=256, heads=32, kv_heads=32)
    verify.check_memory(case, 8, False, 8.0 * 2**30)
    gpu = replace(case, dtype="bf16", seq_len=1 << 20, heads=64, kv_heads=64)
    with pytest.raises(ds_usp.ConfigError, match=r"8 ranks x .* GiB of host memory"):
        verify.check_memory(gpu, 8, True, 2.0**36)


def test_a_launch_with_fewer_gpus_than_ranks_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    assert program.main(["verify"]) == 2
    assert "started 2 ranks here, and there are 1 GPUs" in capsys.readouterr().err


# ------------------------------------------------------------------ verdicts


def judged(case: VerifyCase, error: float, own: float, name: str = "dq") -> int:
    return verify.judge(case, [TensorErrors(name, error, own)])[0]


def test_limits():
    fp32, fp64 = VerifyCase(), VerifyCase(dtype="fp64")
    bf16, capped = VerifyCase(dtype="bf16"), VerifyCase(dtype="fp16", softcap=50.0)
    few = VerifyCase(dtype="bf16", seq_len=67, kv_heads=1, head_dim=16)
    exact: list[tuple[VerifyCase, float, float, str]] = [
        (fp32, 1e-5, 1e-9, "dq"),
        (bf16, 4.4e-3, 3e-3, "dq"),
        (bf16, 1e-6, 1e-7, "lse"),
        # One rounding of the result is no error, and over few elements a ratio is noise.
        (bf16, 1e-9, 0.0, "dq"),
        (bf16, 3.5e-3, 2e-3, "dq"),
        (few, 1e-2, 4e-3, "dq"),
        (bf16, 1e-2, 4e-3, "dsinks"),
        (capped, 0.03, 0.025, "dq"),
    ]
    wrong: list[tuple[VerifyCase, float, float, str]] = [
        (fp32, 1.1e-5, 1.1e-5, "dq"),
        (fp64, 1.1e-12, 1e-12, "dq"),
        (bf16, 4.6e-3, 3e-3, "dq"),
        (bf16, 1e-4, 1e-6, "lse"),
        (bf16, 0.3, 0.3, "dq"),  # the kernel itself is
        (bf16, 4.6e-3, 0.0, "dq"),
        (few, 4e-2, 4e-3, "dq"),
        (bf16, math.inf, 3e-3, "dq"),
    ]
    assert [judged(*each) for each in exact] == [verify.EXACT] * len(exact)
    assert [judged(*each) for each in wrong] == [verify.WRONG] * len(wrong)
    assert verify.judge(fp32, [], "ConfigError: no")[0] == verify.REFUSED


def test_gradients_of_a_one_token_rank_are_compared_with_a_fraction_of_dout():
    here = TorchrunEnv(rank=0, world=1, local_rank=0, local_world=1)
    for seed in range(4):  # its query sees one key: dq is 0, and rounding of any size is none of it
        case = VerifyCase(1, 1, seq_len=1, seed=seed)
        printed: list[str] = []
        assert verify.run_cases([case], here, torch.device("cpu"), printed.append) == 0, printed


def test_a_wrong_call_outweighs_a_refused_one(monkeypatch):
    here = TorchrunEnv(rank=0, world=1, local_rank=0, local_world=1)
    cases = [VerifyCase(1, 1, seq_len=9, layout=x) for x in ("zigzag", "none", "contiguous")]
    monkeypatch.setitem(verify._ABSOLUTE, "fp32", 1e-9)
    printed: list[str] = []
    run = partial(verify.run_cases, env=here, device=torch.device("cpu"), print_line=printed.append)
    assert run(cases) == verify.WRONG
    assert printed[-1] == "\nWRONG (0 exact, 2 WRONG, 1 refused)"
    assert "dsinks" not in printed[1] and "dq" in printed[1] and "limit 1.00e-09" in printed[1]
    assert run(cases[1:2]) == verify.REFUSED


def test_the_rank_that_failed_first_is_named():
    """The other ranks' errors are of a closed connection."""

    def work(env: TorchrunEnv, _: torch.device, dies: bool) -> None:
        if env.rank == 1:
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError("a defect")

    for dies, text in ((False, "KeyError: 'a defect'"), (True, "SIGKILL")):
        with pytest.raises(verify._FAILED, match=text) as failed:
            verify.run_forked(partial(work, dies=dies), 2)
        assert failed.value.error_index == 1


def test_the_planner_is_called_by_its_new_name(capsys):
    with pytest.raises(SystemExit):
        program.main(["plan", "--help"])
    assert capsys.readouterr().out.startswith("usage: ds-usp plan ")
