"""Options of torch's allocators: what is added to a user's, which variable torch reads, when."""

import os

import pretrain_gpt_usp
import pytest
import torch
from programs import CHECKOUT, ROOT, bash, python, run_script
from usp_trainer.arguments import parse

from ds_usp import allocator_variables

REGISTER, THREADS = "pinned_use_cuda_host_register", "pinned_num_register_threads"
PIN = f"{REGISTER}:True,{THREADS}:8"
GROW, STAY = "expandable_segments:True", "expandable_segments:False"
# Names in the header of torch 2.6 to 2.9, and of 2.10 and later, which reads a second variable.
OLD = f'{REGISTER}() {THREADS}() expandable_segments() get_env("PYTORCH_CUDA_ALLOC_CONF")'
NEW = f'{OLD} get_env("PYTORCH_ALLOC_CONF")'
CUDA, ANY = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
ROUNDING = "roundup_power2_divisions:[256:1,512:2,>:4]"


@pytest.mark.parametrize(
    ("given", "header", "variable", "value"),
    [
        ({}, NEW, CUDA, f"{PIN},{GROW}"),
        ({CUDA: ""}, NEW, CUDA, f"{PIN},{GROW}"),
        ({CUDA: "max_split_size_mb:64"}, NEW, CUDA, f"max_split_size_mb:64,{PIN},{GROW}"),
        ({CUDA: f" {ROUNDING}, "}, NEW, CUDA, f"{ROUNDING},{PIN},{GROW}"),
        ({CUDA: STAY}, NEW, CUDA, f"{STAY},{PIN}"),
        ({CUDA: f"{THREADS} : 4"}, NEW, CUDA, f"{THREADS} : 4,{REGISTER}:True,{GROW}"),
        ({CUDA: "backend:cudaMallocAsync"}, NEW, CUDA, f"backend:cudaMallocAsync,{PIN}"),
        ({ANY: "a:1"}, NEW, ANY, f"a:1,{PIN},{GROW}"),
        ({ANY: "a:1"}, OLD, CUDA, f"{PIN},{GROW}"),
        ({ANY: "a:1", CUDA: "b:2"}, NEW, CUDA, f"b:2,{PIN},{GROW}"),
        ({}, OLD.replace(THREADS, "other"), CUDA, f"{REGISTER}:True,{GROW}"),
    ],
)
def test_what_the_user_names_stays_and_what_torch_knows_is_added(given, header, variable, value):
    before = dict(given)
    added = allocator_variables(given, expandable_segments=True, torch_header=header)
    assert added == {variable: value} and given == before
    assert allocator_variables(given | added, expandable_segments=True, torch_header=header) == {}
    without = value.removesuffix(f",{GROW}")
    assert allocator_variables(given, torch_header=header) == {variable: without}


def test_nothing_is_added_for_a_torch_that_does_not_say_what_it_knows():
    assert allocator_variables({CUDA: "a:1"}, expandable_segments=True, torch_header="") == {}


def test_the_installed_torch_reads_it_after_its_import():
    code = (
        "import os, torch, ds_usp; print(ds_usp.allocator_variables(os.environ)); "
        "os.environ.update(ds_usp.allocator_variables(os.environ)); "
        # torch 2.9 does not say what it has read: there only the variable is compared
        "print(getattr(torch._C, '_accelerator_getAllocatorSettings', lambda: None)())"
    )
    given = {ANY: "max_split_size_mb:50", CUDA: "max_split_size_mb:64"}
    done = python("-c", code, **given)
    options = f"max_split_size_mb:64,{PIN}"
    read = options if hasattr(torch._C, "_accelerator_getAllocatorSettings") else "None"
    assert done.stdout.splitlines() == [str({CUDA: options}), read], done.stderr


@pytest.mark.parametrize(
    ("device", "ratio", "states", "is_set"),
    [
        ("cuda", "0.5", False, True),
        ("cuda", "auto", False, True),
        ("cuda", "0.0", True, True),
        ("cuda", "0.0", False, False),
        ("cpu", "0.5", True, False),
    ],
)
def test_the_trainer_sets_them_for_host_memory_on_gpus(device, ratio, states, is_set, monkeypatch):
    monkeypatch.delenv(ANY, raising=False)
    monkeypatch.setenv(CUDA, "max_split_size_mb:64")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for name in ("init_process_group", "get_node_local_rank"):
        monkeypatch.setattr(torch.distributed, name, lambda *_, **__: 0)
    flags = ["--device", device, "--usp-offload-ratio", ratio]
    args = parse([*flags, *(["--usp-states-on-host"] if states else [])])
    assert pretrain_gpt_usp.join_ranks(args).type == device
    added = f",{PIN},{GROW}" if is_set else ""
    assert os.environ[CUDA] == f"max_split_size_mb:64{added}"


@pytest.mark.parametrize(
    ("argument", "device", "is_set"),
    [
        ("--usp-offload-ratio=0.5", "cuda", True),
        ("--usp-states-on-host", "cuda", True),
        ("--usp-states-on-host", "cpu", False),
        ("--usp-mlp-chunks=2", "cuda", False),
    ],
)
def test_a_script_sets_them_for_a_checkout(argument, device, is_set, tmp_path):
    deepspeed = tmp_path / "deepspeed"
    deepspeed.write_text(f'#!/bin/sh\necho "${CUDA}"\n')
    deepspeed.chmod(0o755)
    settings = {"DEVICE": device, "OUTPUT_HOME": str(tmp_path), "DATA_PATH": "data", CUDA: "a:1"}
    settings |= {
        "MEGATRON_DEEPSPEED_PATH": str(CHECKOUT),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    done = bash("tiny", argument, **settings)
    assert (done.returncode, done.stdout) == (0, f"a:1,{PIN},{GROW}\n" if is_set else "a:1\n")


@pytest.mark.parametrize(("ratio", "is_set"), [("0.5", True), ("0", False)])
def test_a_script_sets_them_for_transformers(ratio, is_set, tmp_path):
    torchrun = tmp_path / "torchrun"
    torchrun.write_text(f'#!/bin/sh\necho "${{{CUDA}-}} ${{{ANY}-}}"\n')
    torchrun.chmod(0o755)
    script = ROOT / "examples_deepspeed" / "transformers_sft" / "sft_qwen3_1.7B_usp_32k_2gpu.sh"
    settings = {"USP_OFFLOAD_RATIO": ratio, "PYTHONPATH": str(ROOT), ANY: "a:1, b:2"}
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    done = run_script(script, PATH=path, **settings)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == (f"a:1, b:2,{PIN}" if is_set else "a:1, b:2")
