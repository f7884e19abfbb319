"""The patches of a host as a Markdown table, for readers and for the README."""

from __future__ import annotations

from megatron_patches.bypass import Bypass
from megatron_patches.patch import Patch, PatchSet

_HEAD = ("target", "how", "why", "against", "upstream")


def markdown(patches: PatchSet) -> str:
    """One row a patch, in the order of application, then what they bypass."""
    changed = map(_row, (*patches.patches, *patches.later))
    bypassed = map(_bypass_row, patches.bypassed)
    rows = [_HEAD, ("---",) * len(_HEAD), *changed, *bypassed]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _bypass_row(bypass: Bypass) -> tuple[str, ...]:
    reason = f"{bypass.flag}: {bypass.reason}" if bypass.flag else bypass.reason
    return f"`{bypass.target}`", "bypass", reason, str(bypass.guard), "-"


def _row(patch: Patch) -> tuple[str, ...]:
    targets = ", ".join(f"`{target}`" for target in (patch.target, *patch.also_in))
    guard = ", ".join(filter(None, (str(patch.guard), patch.needs and f"with {patch.needs}")))
    return targets, patch.kind, patch.reason, guard or "-", patch.upstream or "-"
