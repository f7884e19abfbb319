"""In place of CUDA graphs on CPUs: operators that are run again on the same memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    """Records operators with their tensors, and runs them again on the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[Callable[..., Any], Any, Any, Any]] = []
        self.replays = 0

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operators.append((func, args, kwargs or {}, out))
        return out

    def capture_end(self) -> None:
        self.__exit__(None, None, None)

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, out in self.operators:
            inputs = {storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
            again = tree_leaves(func(*args, **kwargs))
            for old, new in zip(tree_leaves(out), again, strict=True):
                if isinstance(old, Tensor) and storage(old) not in inputs:
                    old.copy_(new)


def storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


class Tapes:
    """In place of :class:`graphs.CudaGraphs`."""

    made: ClassVar[list[Tape]] = []

    @contextmanager
    def stream(self) -> Iterator[None]:
        yield

    def renew(self) -> None:
        pass

    def begin(self) -> Tape:
        tape = Tape()
        tape.__enter__()
        self.made.append(tape)
        return tape


@contextmanager
def tapes_for_graphs() -> Iterator[list[Tape]]:
    """The tapes that are made in place of CUDA graphs, without autograd."""
    from ds_usp.integrations.diffusers import graphs, model

    with (
        mock.patch.object(graphs, "CudaGraphs", Tapes),
        mock.patch.object(graphs, "check_device", lambda *_: None),
        mock.patch.object(model, "check_graphs", lambda *_: None),
        mock.patch.object(Tapes, "made", []),
        torch.no_grad(),
    ):
        yield Tapes.made
