"""Random steps on gloo ranks, most of them under attack: a rank raises, skips, sleeps, is stopped
or killed somewhere in a step.

    python scripts/stress.py --cases 2000 --beside 16
    python scripts/stress.py --cases 1 --seed 17          one case again

A case is drawn from its seed: a program (attention of a random call, a Llama, a Flux), an attack or
none, a rank and a place in the forward or backward pass of the second of four steps. Each rank
catches what a step raises and goes on with the next, as trainers and servers do. A case fails if a
step gives a wrong number or takes a rank longer than ``--limit-s`` (beside the time for which the
attack holds it), or if a step without an attack is not exact; after a hang the stacks of the ranks
are printed. A mesh that cannot go on, as after an exchange that one rank did not answer, refuses
every step: these are counted as not recovered.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which ranks would import at their first call, all of them at once
import torch.distributed as dist
from torch import Tensor, nn

import ds_usp
from ds_usp import testing as oracle

STEPS, ATTACKED = 4, 1
TOKENS, BOUND = 64, 1e-5  # transformers computes losses in fp32
PROGRAMS = ("attention", "llama", "flux")
LIBRARIES = {"llama": "transformers", "flux": "diffusers"}
ATTACKS = ("none", "raise", "skip", "sleep", "stop", "kill")
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Attack:
    """On a rank, at an event of its second step.

    Attributes:
        world: ranks; llama and flux have 4.
        tokens, kv_heads, layout, window: of attention; causal with a window of 0.
        place: of all events of the step, as a fraction.
        seconds: for which a rank sleeps or is stopped.
        reduce: steps end with an all-reduce of the caller's own.
        together: steps are requests of :meth:`SequenceMesh.together`; else an enabled model's
            passes, whose number ranks compare.
    """

    program: str
    how: str
    world: int
    rank: int
    place: float
    seconds: float
    ulysses: int
    reduce: bool
    together: bool
    order: str
    tokens: int
    kv_heads: int
    layout: str
    window: int

    @classmethod
    def draw(cls, seed: int) -> Attack:
        rng = random.Random(seed)
        program = rng.choice(PROGRAMS)
        world = rng.choice((2, 3, 4, 6)) if program == "attention" else 4
        return cls(
            program,
            rng.choice(ATTACKS),
            world,
            rng.randrange(world),
            rng.random(),
            rng.uniform(2, 12),
            rng.choice([degree for degree in (1, 2, 4) if world % degree == 0]),
            rng.random() < 0.3,
            program == "attention" or rng.random() < 0.5,
            rng.choice(("ulysses-ring", "ring-ulysses")),
            rng.choice((7, 16, 24, 67, 128)),
            rng.choice((1, 2, 4)),
            rng.choice(("contiguous", "zigzag", "striped")),
            rng.choice((0, 0, 5)),
        )


class Attention(nn.Module):
    """Two layers of attention with a projection between, on a shard; an event in each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """Shapes: x ``[1, s, 4, 8]``."""
        for layer in (self.first, self.second):
            x = attend(layer(x.flatten(2)).view(x.shape))
        out: Tensor = self.last(x.flatten(2))
        return out


def attention_steps(mesh: ds_usp.SequenceMesh, attack: Attack) -> tuple[nn.Module, Any, Any]:
    """A module, and its loss of a step over the mesh and without."""
    module, layout = Attention().double(), mesh.layout(attack.layout, attack.tokens)
    mask = ds_usp.MaskSpec.window(attack.window) if attack.window else ds_usp.MaskSpec.causal()
    tokens = range(attack.tokens)
    allowed = oracle.window(tokens, tokens, attack.window or None, 0)

    def over_mesh(q: Tensor) -> Tensor:
        k = q[:, :, : attack.kv_heads]
        out: Tensor = ds_usp.usp_attention(q, k, k, mesh=mesh, layout=layout, mask=mask)
        return out

    def alone(q: Tensor) -> Tensor:
        k = q[:, :, : attack.kv_heads]
        return oracle.dense_attention(q, k, k, allowed)[0]

    def whole(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        return torch.randn(1, attack.tokens, 4, 8, generator=generator, dtype=torch.float64)

    def run(step: int) -> Tensor:
        out: Tensor = module(layout.shard(whole(step), 1, mesh.rank), over_mesh)
        return out

    def want(step: int) -> Tensor:
        return layout.shard(module(whole(step), alone), 1, mesh.rank)

    return module, run, want


def llama_steps(mesh: ds_usp.SequenceMesh, _: Attack) -> tuple[nn.Module, Any, Any]:
    """The same of a tiny Llama; the whole batch's loss."""
    import transformers

    from ds_usp.integrations.transformers import enable

    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        vocab_size=100,
        num_attention_heads=4,
    )
    model = transformers.LlamaForCausalLM(config).double()

    def run(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(100, (2, TOKENS), generator=generator)
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        return loss

    wanted = [run(step).detach() for step in range(STEPS)]
    enable(model, mesh)
    return model, run, wanted.__getitem__


def flux_steps(mesh: ds_usp.SequenceMesh, _: Attack) -> tuple[nn.Module, Any, Any]:
    """The same of a tiny Flux; the whole output."""
    import diffusers

    from ds_usp.integrations.diffusers import enable

    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        num_attention_heads=4,
        attention_head_dim=16,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    ).double()
    grid = torch.cartesian_prod(torch.arange(4), torch.arange(8)).double()

    def run(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        out: Tensor = model(
            hidden_states=noise(1, 32, 4),
            encoder_hidden_states=noise(1, 8, 32),
            pooled_projections=noise(1, 32),
            timestep=torch.tensor([0.15], dtype=torch.float64),
            img_ids=nn.functional.pad(grid, (1, 0)),
            txt_ids=torch.zeros(8, 3, dtype=torch.float64),
            return_dict=False,
        )[0]
        return out

    wanted = [run(step).detach() for step in range(STEPS)]
    enable(model, mesh)
    return model, run, wanted.__getitem__


class Events:
    """Modules that begin their forward or backward pass, of which one is attacked."""

    def __init__(self, module: nn.Module) -> None:
        self.count, self._at, self._act = 0, -1, lambda: None
        for inner in module.modules():
            if not list(inner.children()):
                inner.register_forward_pre_hook(self._event)
                inner.register_full_backward_pre_hook(self._event)

    def begin(self, at: int, act: Callable[[], None]) -> None:
        self.count, self._at, self._act = 0, at, act

    def _event(self, *_: Any) -> None:
        self.count += 1
        if self.count - 1 == self._at:
            self._act()


class SkippedError(Exception):
    """This rank leaves out the rest of a step."""


def act(attack: Attack) -> None:
    """What the attack does where it happens."""
    if attack.how == "raise":
        raise RuntimeError("attack")
    if attack.how == "skip":
        raise SkippedError
    if attack.how == "sleep":
        time.sleep(attack.seconds)
    else:
        os.kill(os.getpid(), signal.SIGSTOP if attack.how == "stop" else signal.SIGKILL)


def rank_of(attack: Attack, rank: int, folder: Path) -> None:
    """Run the steps; what each gave, and its seconds, go to a file."""
    os.dup2(os.open(folder / f"stderr{rank}", os.O_WRONLY | os.O_CREAT), 2)
    faulthandler.register(signal.SIGUSR1)  # writes the stacks there
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = dist.FileStore(str(folder / "store"), attack.world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=attack.world)
    mesh = ds_usp.SequenceMesh.from_group(None, attack.ulysses, attack.order)
    steps = {"attention": attention_steps, "llama": llama_steps, "flux": flux_steps}
    module, run, want = steps[attack.program](mesh, attack)
    events = Events(module)
    at = -1
    with open(folder / f"rank{rank}", "w", buffering=1) as results:
        for step in range(STEPS):
            attacked = step == ATTACKED and rank == attack.rank and attack.how != "none"
            if attacked:
                at = int(attack.place * events.count)
            events.begin(at if attacked else -1, lambda: act(attack))
            start = time.monotonic()
            try:
                with mesh.together(f"step {step}") if attack.together else nullcontext():
                    out = run(step)
                    error = float((out - want(step)).abs().max())
                    out.square().sum().backward()
                    if attack.reduce:
                        dist.all_reduce(torch.ones(3))
                outcome = "exact" if error < BOUND else f"WRONG by {error}"
            except (Exception, SkippedError) as raised:
                outcome = f"{type(raised).__name__}: {raised}"
            seconds = time.monotonic() - start
            results.write(json.dumps([step, outcome.splitlines()[0], seconds]) + "\n")
    os._exit(0)


class Case:
    """Ranks under one attack.

    Attributes:
        verdict: "" while it runs.
    """

    def __init__(self, seed: int, limit_s: float) -> None:
        self.seed, self.attack, self.limit_s = seed, Attack.draw(seed), limit_s
        self.verdict, self.report = "", ""
        self._directory = tempfile.TemporaryDirectory(prefix="usp-attack-")
        self._folder, self._start = Path(self._directory.name), time.monotonic()
        self._stopped: float | None = None
        self._ranks = [
            _FORK.Process(target=rank_of, args=(self.attack, rank, self._folder), daemon=True)
            for rank in range(self.attack.world)
        ]
        for process in self._ranks:
            process.start()

    def poll(self) -> None:
        """Wake a rank that stopped itself; look for the end."""
        victim = self._ranks[self.attack.rank]
        if self.attack.how == "stop" and victim.is_alive():
            state = Path(f"/proc/{victim.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            if state == "T" and self._stopped is None:
                self._stopped = time.monotonic()
            if self._stopped and time.monotonic() > self._stopped + self.attack.seconds:
                os.kill(victim.pid or 0, signal.SIGCONT)
        alive = [rank for rank, process in enumerate(self._ranks) if process.is_alive()]
        waited = time.monotonic() - self._start
        if alive and waited < STEPS * (self.limit_s + self.attack.seconds):
            return
        self._judge(alive)

    def close(self) -> None:
        for process in self._ranks:
            process.kill()
            process.join()
        self._directory.cleanup()

    def _judge(self, alive: list[int]) -> None:
        rows = {rank: list(self._rows(rank)) for rank in range(self.attack.world)}
        lines = [f"rank {rank}: {row}" for rank, each in rows.items() for row in each]
        lines += [f"rank {rank}: {self._stacks(rank)}" for rank in alive]
        self.report = "\n".join([f"seed {self.seed}, {self.attack}", *lines])
        killed = self.attack.how == "kill"
        limit = self.limit_s + self.attack.seconds * (self.attack.how in ("sleep", "stop"))
        slow = any(seconds > limit for each in rows.values() for *_, seconds in each)
        if alive or slow:
            self.verdict = "HANG"
        elif any(outcome.startswith("WRONG") for each in rows.values() for _, outcome, _ in each):
            self.verdict = "WRONG"
        elif self.attack.how == "none":
            exact = [[step, "exact"] for step in range(STEPS)]
            whole = all([row[:2] for row in each] == exact for each in rows.values())
            self.verdict = "exact" if whole else "WRONG"
        elif killed:
            self.verdict = "killed, refused"
        elif all(each and each[-1][:2] == [STEPS - 1, "exact"] for each in rows.values()):
            self.verdict = "recovered"
        else:
            self.verdict = "not recovered"

    def _stacks(self, rank: int) -> str:
        process = self._ranks[rank]
        os.kill(process.pid or 0, signal.SIGUSR1)
        process.join(1)  # while it writes them
        return (self._folder / f"stderr{rank}").read_text()

    def _rows(self, rank: int) -> Iterator[list[Any]]:
        path = self._folder / f"rank{rank}"
        for line in path.read_text().splitlines() if path.exists() else ():
            yield json.loads(line)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 1 after a hang or a wrong number."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--cases", type=int, default=100, help="default: 100")
    add("--seed", type=int, default=0, help="of the first case (default: 0)")
    add("--beside", type=int, default=1, help="cases that run side by side (default: 1)")
    add("--limit-s", type=float, default=20.0, help="of a step (default: 20)")
    add("--verbose", action="store_true", help="print every case that did not recover, too")
    args = parser.parse_args(argv)
    seeds = iter(range(args.seed, args.seed + args.cases))
    programs = {Attack.draw(seed).program for seed in range(args.seed, args.seed + args.cases)}
    for program in programs & LIBRARIES.keys():
        importlib.import_module(LIBRARIES[program])  # once, before ranks are forked

    counts: Counter[str] = Counter()
    running: list[Case] = []
    while True:
        while len(running) < args.beside and (seed := next(seeds, None)) is not None:
            running.append(Case(seed, args.limit_s))
        if not running:
            break
        time.sleep(0.1)
        for case in list(running):
            case.poll()
            if case.verdict:
                running.remove(case)
                case.close()
                counts[case.verdict] += 1
                bad = case.verdict in ("HANG", "WRONG")
                if bad or (args.verbose and case.verdict == "not recovered"):
                    print(f"{case.verdict}, {case.report}", flush=True)
                if sum(counts.values()) % 100 == 0:
                    print(_said(counts), flush=True)
    print(_said(counts), flush=True)
    return int(bool(counts["HANG"] or counts["WRONG"]))


def _said(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


if __name__ == "__main__":
    sys.exit(main())
