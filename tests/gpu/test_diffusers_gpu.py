"""Diffusion transformers on two GPUs, also in CUDA graphs: fp32, tiny models, against one GPU."""

import contextlib
import io
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gpu_ranks import join_and_run, needs_two, new_store, run_on_gpus
from torch import Tensor

import ds_usp

pytestmark = [
    pytest.mark.several_gpus,
    pytest.mark.skipif(find_spec("diffusers") is None, reason="needs diffusers"),
    needs_two,
]
ROOT = Path(__file__).resolve().parents[2]
WORLD = 2
MESHES = (2, 1)  # Ulysses degrees
BOUND = 1e-5
# diffusers has a plan of its own for these, see tests/integrations/test_diffusers_backend.py
PARALLEL = (
    *("FluxTransformer2DModel", "Flux2Transformer2DModel", "WanTransformer3DModel"),
    "QwenImageTransformer2DModel",
)
SAMPLING = "--steps 6 --check 4 --height 48 --width 80 --num-frames 9"
TRAINING = "--steps 3 --check --optimizer sgd --samples 2 --batch-size 2 --text-tokens 7"
GENERATE = (
    *(f"--tiny flux {SAMPLING}", f"--tiny wan --ulysses-degree 1 {SAMPLING}"),
    f"--tiny flux --cuda-graphs {SAMPLING}",
)
TRAIN = (
    f"--tiny wan --size 3 6 10 --lr 0.2 --gradient-checkpointing {TRAINING}",
    f"--tiny flux --size 10 14 --lr 0.02 --ulysses-degree 1 {TRAINING}",
)
ZERO = ("--deepspeed", '{"zero_optimization": {"stage": 2}}')
Check = Callable[[torch.device], Iterator[tuple[str, float]]]


def set_up(rank: int) -> None:
    """What the checks and the programs of the examples need of a rank's process."""
    sys.path += [str(ROOT / "tests" / "integrations"), str(ROOT / "examples_deepspeed/diffusion")]
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    os.environ.update(ranks)
    torch.backends.cudnn.allow_tf32 = False  # of convolutions


def rank_main(rank: int, world: int, checks: tuple[Check, ...]) -> None:
    """Every check yields a name and an error; all are run before one that is too large raises."""
    set_up(rank)
    errors: dict[str, float] = {}
    for check in checks:
        begin = time.perf_counter()
        try:
            of_check = dict(check(torch.device("cuda")))
        except pytest.fail.Exception as failed:  # of pytest.raises: no Exception, so spawn would
            raise AssertionError(str(failed)) from failed  # say "exit code 1" and nothing more
        seconds = time.perf_counter() - begin
        errors |= of_check
        say(f"{check.__name__}: {len(of_check)} in {seconds:.1f} s")
        say(*(f"  {name}: {error:.1e}" for name, error in of_check.items()))
    wrong = {name: error for name, error in errors.items() if not error <= BOUND}
    assert not wrong, wrong
    dist.barrier()


def run(*checks: Check) -> None:
    run_on_gpus(rank_main, WORLD, checks)


def say(*lines: str) -> None:
    if dist.get_rank() == 0:
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()


def relative(have: Tensor, want: Tensor) -> float:
    return float((have.double() - want.double()).norm() / want.double().norm())


def model_on(device: torch.device, name: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    """A tiny transformer and the arguments of a pass, text padded where the class knows of it."""
    from tiny_diffusers import MASKS, arguments, build

    given = arguments(name, padded=name in MASKS, **options)
    return build(name).eval().to(device), moved(given, device)


def moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Mapping):
        return {key: moved(inner, device) for key, inner in value.items()}
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
        return type(value)(x.to(device) for x in value)
    return value.to(device) if isinstance(value, Tensor) else value


def output_and_gradients(transformer: Any, given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    from tiny_diffusers import output_of

    output = output_of(transformer, given)
    output.square().mean().backward()
    gradients = [p.grad.flatten() for p in transformer.parameters() if p.grad is not None]
    joined = torch.cat(gradients)
    transformer.zero_grad()
    return output.detach(), joined


def classes(device: torch.device) -> Iterator[tuple[str, float]]:
    """Outputs and gradients of every class with a plan, on both meshes."""
    from tiny_diffusers import CLASSES

    from ds_usp.integrations.diffusers import enable

    for name in CLASSES:
        transformer, given = model_on(device, name)
        want, gradients = output_and_gradients(transformer, given)
        for ulysses in MESHES:
            mesh = ds_usp.SequenceMesh.from_group(None, ulysses)
            with enable(transformer, mesh):
                have, summed = output_and_gradients(transformer, given)
            dist.all_reduce(summed)
            yield f"{name}, ulysses {ulysses}", relative(have, want)
            yield f"{name}, ulysses {ulysses}, gradients", relative(summed / WORLD, gradients)


def guidance(device: torch.device) -> Iterator[tuple[str, float]]:
    """Each sample of a batch on a rank of its own."""
    from ds_usp.integrations.diffusers import enable

    for name in ("SD3Transformer2DModel", "PixArtTransformer2DModel", "LTXVideoTransformer3DModel"):
        transformer, given = model_on(device, name)
        with torch.no_grad():
            want = transformer(**given).sample
            for ulysses in MESHES:
                mesh = ds_usp.SequenceMesh.from_group(None, ulysses)
                with enable(transformer, mesh, cfg_degree=2):
                    text = f"{name}, cfg_degree 2 of ulysses {ulysses}"
                    yield text, relative(transformer(**given).sample, want)


def parallelism_of_diffusers(device: torch.device) -> Iterator[tuple[str, float]]:
    """Its ``enable_parallelism`` with ``usp`` as its attention backend."""
    from diffusers import ContextParallelConfig
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry
    from tiny_diffusers import arguments, build

    from ds_usp.integrations.diffusers import register_backend

    register_backend()
    before = _AttentionBackendRegistry.get_active_backend()[0]
    count, torch.accelerator.device_count = torch.accelerator.device_count, lambda: WORLD
    for name in PARALLEL:
        given = moved(arguments(name, odd=False), device)
        with torch.no_grad():
            want = build(name).eval().to(device)(**given).sample
            for ulysses in MESHES:
                transformer = build(name).eval().to(device)
                transformer.set_attention_backend("usp")
                _AttentionBackendRegistry.set_active_backend(before)
                degrees = {"ulysses_degree": ulysses, "ring_degree": WORLD // ulysses}
                transformer.enable_parallelism(config=ContextParallelConfig(**degrees))
                have = transformer(**given, return_dict=False)[0]
                yield f"{name}, enable_parallelism, ulysses {ulysses}", relative(have, want)
    torch.accelerator.device_count = count


def refused_capture(device: torch.device) -> Iterator[tuple[str, float]]:
    """A capture of one's own is refused by name, and leaves the transformer usable."""
    from ds_usp.integrations.diffusers import enable

    transformer, given = model_on(device, "WanTransformer3DModel")
    with torch.no_grad(), enable(transformer, ds_usp.SequenceMesh.from_group(None, 2)):
        want = transformer(**given).sample
        with (
            pytest.raises(ds_usp.UnsupportedAttentionError, match="CUDA graph captures"),
            torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"),
        ):
            transformer(**given)
        yield "after a refused CUDA graph", relative(transformer(**given).sample, want)


def host_and_gpu(device: torch.device) -> Iterator[tuple[str, float]]:
    """The host does not wait for the GPU within a pass; other noise on a rank is an error."""
    from ds_usp.integrations.diffusers import enable

    for name in ("WanTransformer3DModel", "FluxTransformer2DModel"):
        transformer, given = model_on(device, name)
        mesh = ds_usp.SequenceMesh.from_group(None, 2)
        with torch.no_grad():
            alone = waits(transformer, given)
            with enable(transformer, mesh):
                transformer(**given)  # the first calls of a kind wait for the other ranks' records
                sharded = waits(transformer, given)
        say(f"{name}: waits of one GPU: {alone or 'none'}; of the mesh: {sharded or 'none'}")
        yield f"{name}, waits within a pass", float("inf") if sharded and not alone else 0.0
    with torch.no_grad():
        want = transformer(**given).sample
        with enable(transformer, mesh):
            noise = {"hidden_states": given["hidden_states"] + dist.get_rank()}
            with pytest.raises(ds_usp.MeshError, match="noise from generators of one seed"):
                transformer(**given | noise)
            yield "after other noise on a rank", relative(transformer(**given).sample, want)


def waits(transformer: Any, given: Mapping[str, Any]) -> str:
    """Where the host waits for the GPU first within a pass."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        transformer(**given)
    except RuntimeError as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"{frame.filename}:{frame.lineno}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def generation(device: torch.device) -> Iterator[tuple[str, float]]:
    for command in GENERATE:
        yield f"generate.py {command}", of_program("generate", device, command.split())


def training(device: torch.device) -> Iterator[tuple[str, float]]:
    for command in TRAIN:
        error = of_program("train_flow_matching", device, [*command.split(), *ZERO])
        yield f"train_flow_matching.py {command}", error


def of_program(program: str, device: torch.device, flags: list[str]) -> float:
    """0 if a program of examples_deepspeed/diffusion ends well; infinite otherwise."""
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(printed):
        flags = [*flags, "--device", device.type, "--output", folder]
        code = import_module(program).main(flags)
    say(*printed.getvalue().splitlines()[-1:])
    return 0.0 if code == 0 else float("inf")


def compiled(device: torch.device) -> Iterator[tuple[str, float]]:
    """Compiled blocks, in CUDA graphs too where one GPU's blocks can be, against eager ones."""
    from ds_usp.integrations.diffusers import enable

    transformer, given = model_on(device, "WanTransformer3DModel")
    mesh = ds_usp.SequenceMesh.from_group(None, 2)
    with torch.no_grad():
        want = transformer(**given).sample
        for mode in ("default", "reduce-overhead"):
            alone, _ = of_compiled_blocks(transformer, given, mode, want)
            with enable(transformer, mesh):
                error, reason = of_compiled_blocks(transformer, given, mode, want)
            say(f"{mode}: one GPU {alone:.1e}, the mesh {error:.1e} {reason}")
            if alone <= BOUND:  # "reduce-overhead" of Wan's blocks is refused by torch
                yield f"blocks compiled, mode {mode}", error


def of_compiled_blocks(
    transformer: Any, given: Mapping[str, Any], mode: str, want: Tensor
) -> tuple[float, str]:
    """The error of the last of four passes: torch warms up, records and replays twice; infinite,
    with the reason, where torch refuses."""
    torch._dynamo.reset()
    transformer.compile_repeated_blocks(mode=mode, fullgraph=True)
    try:
        for _ in range(4):
            have = transformer(**given).sample.clone()
    except RuntimeError as error:
        return float("inf"), str(error)[:300]
    return relative(have, want), ""


def test_transformers_and_sampling():
    run(classes, guidance, parallelism_of_diffusers, refused_capture, host_and_gpu, generation)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")
def test_training():
    run(training)


def test_compiled_blocks():
    run(compiled)


KILLED_AFTER = 6  # passes: without a graph, captured, replayed
PATIENCE_S = 30
# Their forward passes copy from the CPU, which torch cannot capture.
NOT_CAPTURED = (
    *("ChromaTransformer2DModel", "CogView4Transformer2DModel"),
    "LTX2VideoTransformer3DModel",
)


def graphs(device: torch.device) -> Iterator[tuple[str, float]]:
    """Passes that ds_usp captures, of two batches in turns, compiled too; a rank that differs."""
    from tiny_diffusers import ALWAYS_MASKED, CLASSES, arguments, build, output_of

    from ds_usp.integrations.diffusers import enable

    for name in [name for name in CLASSES if name not in (*ALWAYS_MASKED, *NOT_CAPTURED)]:
        transformer = build(name).eval().to(device)
        batches = [moved(arguments(name, seed=seed), device) for seed in (1, 2)]
        with torch.no_grad():
            wants = [output_of(transformer, given) for given in batches]
            for ulysses in MESHES:
                mesh = ds_usp.SequenceMesh.from_group(None, ulysses)
                with enable(transformer, mesh, cuda_graphs=True):
                    yield (
                        f"{name}, ulysses {ulysses}, CUDA graphs",
                        of_turns(transformer, batches, wants),
                    )
    with torch.no_grad():
        for name in NOT_CAPTURED:
            transformer, given = build(name).eval().to(device), moved(arguments(name), device)
            want, mesh = output_of(transformer, given), ds_usp.SequenceMesh.from_group(None, 2)
            with enable(transformer, mesh, cuda_graphs=True):
                error = relative(output_of(transformer, given), want)  # before the capture
                # Of the same kind, with return_dict=False too: else it is another's first pass.
                with pytest.raises(ds_usp.UnsupportedAttentionError, match="between CPU and CUDA"):
                    output_of(transformer, given)
            yield f"{name}, refused by name", error
        for ulysses in MESHES:
            yield (
                f"SD3, cfg_degree 2 of ulysses {ulysses}, CUDA graphs",
                of_branches(device, ulysses),
            )
        transformer, given = model_on(device, "WanTransformer3DModel")
        want = transformer(**given).sample
        mesh = ds_usp.SequenceMesh.from_group(None, 2)
        with enable(transformer, mesh, cuda_graphs=True):
            transformer.compile_repeated_blocks(fullgraph=True)
            yield "compiled blocks in CUDA graphs", of_turns(transformer, [given], [want])
            if dist.get_rank():  # has no graph any more
                transformer.proj_out.weight.data = transformer.proj_out.weight.data.clone()
            with pytest.raises(ds_usp.MeshError, match="replayed from a CUDA graph"):
                output_of(transformer, given)  # of the same kind
            yield "after ranks that differ", of_turns(transformer, [given], [want])


def of_branches(device: torch.device, ulysses: int) -> float:
    """Of two samples in turns with the first, which all ranks compute: of the same shapes."""
    from tiny_diffusers import output_of

    from ds_usp.integrations.diffusers import enable

    transformer, given = model_on(device, "SD3Transformer2DModel")
    batches = [given, {name: x[:1] for name, x in given.items()}]
    wants = [output_of(transformer, batch) for batch in batches]
    mesh = ds_usp.SequenceMesh.from_group(None, ulysses)
    with enable(transformer, mesh, cfg_degree=2, cuda_graphs=True):
        return of_turns(transformer, batches, wants)


def of_turns(transformer: Any, batches: list[Any], wants: list[Tensor]) -> float:
    """The largest error of four passes with each batch; infinite, with the reason, if refused."""
    from tiny_diffusers import output_of

    try:
        outputs = [output_of(transformer, given) for _ in range(4) for given in batches]
    except ds_usp.UnsupportedAttentionError as error:
        say(str(error)[:300])
        return float("inf")
    return max(relative(*pair) for pair in zip(outputs, 4 * wants, strict=True))


def killed_main(rank: int, world: int, ulysses: int, outcome: Any) -> None:
    """Replay passes until rank 1 is killed; rank 0 puts its error, the seconds that it took, and
    those until the GPU was idle."""
    from ds_usp.integrations.diffusers import enable

    set_up(rank)
    transformer, given = model_on(torch.device("cuda"), "WanTransformer3DModel")
    mesh = ds_usp.SequenceMesh.from_group(None, ulysses)
    with torch.no_grad(), enable(transformer, mesh, cuda_graphs=True):
        for _ in range(KILLED_AFTER):
            transformer(**given)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        if rank:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            while True:
                transformer(**given)
        except ds_usp.MeshError as error:
            noticed = time.perf_counter() - begin
            torch.cuda.synchronize()
            outcome.put((str(error), noticed, time.perf_counter() - begin))


def test_cuda_graphs():
    run(graphs)


@pytest.mark.parametrize("ulysses", MESHES)
def test_a_rank_killed_between_replays(ulysses):
    """The other rank gets an error within seconds, and its GPU does not wait for ever."""
    context = mp.get_context("spawn")
    outcome, store = context.Queue(), new_store()
    ranks = [
        context.Process(
            target=join_and_run,
            args=(rank, WORLD, store.port, killed_main, (ulysses, outcome)),
            daemon=True,
        )
        for rank in range(WORLD)
    ]
    for process in ranks:
        process.start()
    try:
        text, noticed, idle = outcome.get(timeout=120)
    finally:
        for process in ranks:
            process.kill()
    sys.stdout.write(f"ulysses {ulysses}: {noticed:.2f} s, GPU idle {idle:.2f} s: {text}\n")
    assert "rank 1" in text
    assert idle < PATIENCE_S
