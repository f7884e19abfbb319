"""The rule which parallel degrees fit a model's heads and a number of ranks: its only owner. Each
rank asks by itself: for its arguments, for a mesh, for the heads of a new call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, NamedTuple

from ds_usp.errors import ConfigError

Names = Mapping[str, str]
_Broken = Iterator[tuple[str, str]]  # rule and message, as of a Refusal
_Named = Callable[[str], str]  # a field's name and value in the user's words, as "--tp 3"


def divisors(size: int) -> list[int]:
    """The degrees into which that many ranks can be divided, ascending."""
    low = [degree for degree in range(1, math.isqrt(max(size, 0)) + 1) if size % degree == 0]
    return low + [size // degree for degree in reversed(low) if degree * degree != size]


# The rule has one owner because every entry point asks it (mesh, drop-in, planner, trainer, both
# Megatrons) and each names the degrees differently. They pass the names; numbers, reasons and what
# would fit come from here, so no two of them can disagree.
class Refusal(NamedTuple):
    """A rule that degrees break: without numbers, to count by, and the full message."""

    rule: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """Parallel degrees, with what they must divide; what is None is not known and not checked.

    Args:
        sp: ranks that share a sequence.
        ulysses: of the ``sp`` ranks, those that exchange heads for sequence.
        ring: of the ``sp`` ranks, those that exchange keys and values.
        tp, pp: ranks of tensor and of pipeline parallelism.
        world: all ranks; data parallelism takes what the other degrees leave.
        heads, kv_heads: of the whole model; of a tensor-parallel rank where ``tp`` is left at 1.
        ffn: width of the MLP.

    Attributes:
        KEYWORDS, FLAGS, SETTINGS: what users call the degrees in Python, on the command lines and
            in the shell scripts, for messages: ``--name``, a name, or a text with ``{}``.
    """

    KEYWORDS: ClassVar[Names] = MappingProxyType(
        {
            "sp": "the {} ranks of the sequence-parallel group",
            "ulysses": "ulysses_degree",
            "ring": "ring_degree",
        }
    )
    FLAGS: ClassVar[Names] = MappingProxyType(
        {
            "sp": "--ds-sequence-parallel-size",
            "ulysses": "--ulysses-degree",
            "tp": "--tensor-model-parallel-size",
            "pp": "--pipeline-model-parallel-size",
        }
    )
    SETTINGS: ClassVar[Names] = MappingProxyType(
        {"sp": "SP_SIZE", "ulysses": "ULYSSES_DEGREE", "tp": "MP_SIZE", "pp": "PP_SIZE"}
    )

    sp: int
    ulysses: int | None = None
    ring: int | None = None
    tp: int = 1
    pp: int = 1
    world: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn: int | None = None

    @property
    def dp(self) -> int:
        """Data-parallel replicas of ``world``: what the other degrees leave."""
        return (self.world or 0) // (self.tp * self.sp * self.pp)

    def valid_ulysses(self) -> list[int]:
        """Ulysses degrees that divide ``sp``, leave every rank a query head and, where ``ring`` is
        known, leave that ring; descending."""
        degrees = self._ulysses_within_heads()
        return [u for u in degrees if self.ring is None or u * self.ring == self.sp]

    def _ulysses_within_heads(self) -> list[int]:
        max_degree = self.sp if self.heads is None else self.heads // self.tp
        return [degree for degree in reversed(divisors(self.sp)) if degree <= max_degree]

    def check(self, names: Names = KEYWORDS) -> Degrees:
        """The degrees themselves; ``names`` as of :meth:`refusal`.

        Raises:
            ConfigError: they do not fit, with the number found, the number wanted and what fits.
        """
        refusal = self.refusal(names)
        if refusal:
            raise ConfigError(refusal.message)
        return self

    def refusal(self, names: Names = KEYWORDS) -> Refusal | None:
        """The first rule that the degrees break; None if they fit.

        Args:
            names: what the user calls each degree, by field; its own name where left out.
        """

        def named(field: str) -> str:
            name, value = names.get(field, field), getattr(self, field)
            if "{}" in name:
                return name.format(value)
            return f"{name} {value!r}" if name.startswith("--") else f"{name}={value!r}"

        rules = (self._sizes, self._heads, self._sequence, self._world)
        broken = (Refusal(*texts) for rule in rules for texts in rule(named))
        return next(broken, None)

    def _sizes(self, named: _Named) -> _Broken:
        for field in ("tp", "sp", "ulysses", "ring", "pp"):
            size = getattr(self, field)
            if size is None and field in ("ulysses", "ring"):
                continue
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                text = f"{named(field)} must be a whole number of 1 or more"
                yield "a degree is no whole number of 1 or more", text

    def _heads(self, named: _Named) -> _Broken:
        heads, kv_heads, tp = self.heads, self.kv_heads, self.tp
        if heads is not None and heads < 1:
            yield "there is no query head", f"{heads} query heads: there must be 1 or more"
        if heads is not None and kv_heads is not None:
            if kv_heads < 1 or heads % kv_heads:
                yield (
                    "heads are no multiple of the key/value heads",
                    f"{heads} query heads cannot share {kv_heads} key/value heads: the first "
                    "number must be a multiple of the second",
                )
            if math.gcd(heads, kv_heads) % tp:
                yield (
                    "tp does not divide the heads",
                    f"{named('tp')} must divide the {heads} query heads and the {kv_heads} "
                    f"key/value head{'s' * (kv_heads > 1)}. Use one of {_listed(kv_heads)}; "
                    "sequence parallelism serves any number of key/value heads",
                )
        elif heads is not None and heads % tp:
            yield (
                "tp does not divide the heads",
                f"{named('tp')} must divide the {heads} query heads. Use one of {_listed(heads)}",
            )
        if self.ffn is not None and self.ffn % tp:
            yield (
                "tp does not divide the MLP",
                f"{named('tp')} must divide the MLP's width of {self.ffn}. Use one of "
                f"{_listed(math.gcd(self.ffn, heads or self.ffn))}",
            )

    def _sequence(self, named: _Named) -> _Broken:
        """Check Ulysses x ring against ranks and heads; of a ring alone the Ulysses degree that it
        leaves. The first rule that is broken is read, so later ones assume the earlier."""
        valid = self._ulysses_within_heads()
        fix = f"Use one of {', '.join(f'{u} (ring {self.sp // u})' for u in valid)}"
        if self.ulysses is not None and self.sp % self.ulysses:
            yield (
                "ulysses does not divide the ranks of a sequence",
                f"{named('ulysses')} does not divide {named('sp')}. {fix}",
            )
        if self.ring is not None and self.sp % self.ring:
            yield (
                "ring does not divide the ranks of a sequence",
                f"{named('ring')} does not divide {named('sp')}. Use one of {_listed(self.sp)}",
            )
        if self.ulysses and self.ring and self.ulysses * self.ring != self.sp:
            yield (
                "ulysses x ring is not the ranks of a sequence",
                f"{named('ulysses')} x {named('ring')} = {self.ulysses * self.ring} is not "
                f"{named('sp')}: leave one of the two out",
            )
        ulysses, name = self.ulysses, named("ulysses")
        if ulysses is None and self.ring:
            ulysses = self.sp // self.ring
            name = f"{named('ring')} of {named('sp')} leaves {ulysses} Ulysses ranks, which"
        if self.heads is not None and ulysses not in (None, *valid):
            local = self.heads // self.tp
            model = f" ({self.heads} heads, {named('tp')})" if self.tp > 1 else ""
            verb = "needs" if self.ulysses else "need"
            yield (
                "ulysses beyond the heads of a tensor-parallel rank",
                f"{name} {verb} at least {ulysses} query heads on each "
                f"tensor-parallel rank, there are {local}{model}. {fix}",
            )

    def _world(self, named: _Named) -> _Broken:
        replica = self.tp * self.sp * self.pp
        if self.world is not None and self.world % replica:
            degrees = " x ".join(map(named, ("tp", "sp", "pp")))
            yield (
                "degrees do not divide the ranks",
                f"{self.world} ranks cannot hold {degrees} = {replica} ranks. Use a multiple of "
                f"{replica} ranks, or lower a degree",
            )


def zero_refusal(zero: int, stages: int, *, bf16: bool) -> Refusal | None:
    """Return why DeepSpeed's ZeRO stage would not train as one rank does; None if it would.

    Args:
        stages: of the pipeline; 1 without one.
        bf16: weights are in bf16.
    """
    if stages > 1 and zero > 1:
        rule = f"ZeRO-{zero} does not go with a pipeline"
        return Refusal(
            rule,
            f"{rule}, here of {stages} stages: it sums gradients over interleaved micro batches, "
            "and ZeRO-2 and 3 would shard them after each. Use ZeRO-1, or no pipeline",
        )
    if bf16 and zero == 0:
        rule = "ZeRO-0 sums gradients of bf16 weights in bf16"
        return Refusal(rule, f"{rule}. Use ZeRO-1 with data_types.grad_accum_dtype fp32")
    return None


def _listed(size: int) -> str:
    return ", ".join(map(str, divisors(size)))
