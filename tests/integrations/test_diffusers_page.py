"""docs/usage/diffusers.md: its table, and its first program as somebody pastes it."""

from __future__ import annotations

import re
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from harness import RankContext, WorkerPool
from tiny_diffusers import MASKS

from ds_usp.integrations.diffusers import PLANS

PAGE = Path(__file__).parents[2] / "docs" / "usage" / "diffusers.md"


def test_the_page_lists_the_classes() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("## Which classes\n\n")[2]
    rows = []
    for name, plan in PLANS.items():
        kinds = {kind for order in plan.attention.values() for kind in order}
        kinds = {"image", "text"} if "joint" in kinds else kinds - {"reference"}
        mask = f" `{MASKS[name]}`" if name in MASKS else ""
        rows.append(f"| `{name}` | {' and '.join(sorted(kinds))} |{mask} |")
    assert table.partition("\n\n")[0].splitlines()[2:] == rows
    # Z-Image makes its mask itself, of the lengths of a list of samples.
    masked = {name for name, plan in PLANS.items() if plan.masks}
    assert masked - {*MASKS} == {"ZImageTransformer2DModel"}


def first_program(ctx: RankContext) -> bool:
    """With no names but its own."""
    program = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]
    names: dict[str, object] = {}
    with (  # the ranks have met, and stay together for other tests
        mock.patch.object(dist, "init_process_group") as begin,
        mock.patch.object(dist, "destroy_process_group") as end,
    ):
        exec(compile(program, str(PAGE), "exec"), names)
    assert begin.call_count == end.call_count == 1
    return bool(names["difference"] < 1e-5)  # type: ignore[operator]


def test_the_first_program_is_complete(pool: WorkerPool) -> None:
    assert pool.run(first_program, 4) == [True] * 4
