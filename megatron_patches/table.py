"""The patches of a host as a Markdown table, for readers and for the README."""

from __future__ import annotations

from megatron_patches.patch import Patch, PatchSet

_HEAD = ("target", "how", "why", "against", "upstream")


def markdown(patches: PatchSet) -> str:
    """One row a patch, in the order of application."""
    rows = [_HEAD, ("---",) * len(_HEAD), *map(_row, (*patches.patches, *patches.later))]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(patch: Patch) -> tuple[str, ...]:
    places = ", ".join(f"`{place}`" for place in (patch.target, *patch.also_in))
    against = ", ".join(filter(None, (str(patch.guard), patch.needs and f"with {patch.needs}")))
    return places, patch.kind, patch.reason, against or "-", patch.upstream or "-"
