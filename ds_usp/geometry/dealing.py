"""Samples of one step, dealt to groups of ranks: each to as many ranks as it needs, and no more.

A degree that is the same for all samples is set by the longest one. Shorter ones are then cut over
as many ranks, and exchange what one rank could have computed alone. Here a step's samples are given
to groups of several sizes at once. Who gets what is a function of the lengths alone: each rank
computes it for itself, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd

from ds_usp.errors import ConfigError, DataError
from ds_usp.geometry.degrees import divisors

# Seconds that a sample of so many tokens adds to each rank of a group of so many, forward and
# backward; of 0 tokens what a micro batch takes before its first. Any unit will do.
Cost = Callable[[int, int], float]

MOST_SIZES = 16  # groups of each rank, each with communicators of its own
# A search for a shorter micro batch ends at this fraction of it.
_CLOSE = 0.01
_NO_LIMIT = float("inf")
_MORE_MICRO_BATCHES = 2  # that are tried beyond what memory needs


def group_sizes(world: int) -> tuple[int, ...]:
    """The default sizes: 1, 2, 3, 4, 6, 8, 12, 16 ... up to ``world``, and that itself."""
    powers = [2**i for i in range(world.bit_length())]
    sizes = {1, world, *powers, *(3 * x for x in powers)}
    return tuple(sorted(x for x in sizes if x <= world))


def groups_of_size(world: int, size: int) -> tuple[range, ...]:
    """The groups of ``size`` ranks that there are, contiguous and disjoint.

    Each lies in a window of ranks, the smallest divisor of ``world`` that holds it; so of 8 ranks
    the groups of 3 are 0 to 2 and 4 to 6. Windows of one size are nested in larger ones, as GPUs
    are in nodes, and a group never stands across two of them.
    """
    window = next(x for x in divisors(world) if x >= size)
    if window >= 2 * size:  # of 7 ranks: 0 and 1, 2 and 3, 4 and 5
        window = size
    starts = range(0, world - size + 1, window)
    return tuple(range(start, start + size) for start in starts)


def ulysses_of(size: int, heads: tuple[int, int] | None, in_node: int) -> int:
    """The Ulysses degree of a group: the largest part of its ranks among which query heads and
    key/value heads divide, and which are in one node; a ring takes the rest, and all of it where
    heads are not known."""
    fit = (x for x in divisors(size) if gcd(*heads or (1,)) % x == 0 and x <= in_node)
    return max(fit)


@dataclass(frozen=True)
class SampleCost:
    """A cost without seconds: in tokens that pass linear layers.

    Args:
        hidden: width of the model. A layer has 24 ``hidden``² FLOP a token in its products, and
            4 ``hidden`` for each pair of tokens that attention computes.
        exchange: of a group's work, what exchanges add to it.
        start, latency: tokens that take as long as the launch of a micro batch, and as its
            exchanges without any bytes.
    """

    hidden: int = 4096
    exchange: float = 0.05
    start: int = 256
    latency: int = 128

    def __call__(self, tokens: int, ranks: int) -> float:
        work = tokens + tokens * tokens / 2 / (6 * self.hidden)
        shared = ranks > 1
        return self.start + self.latency * shared + work * (1 + self.exchange * shared) / ranks


@dataclass(frozen=True)
class DealtGroup:
    """Consecutive ranks that share a packed row of samples in one micro batch.

    Args:
        ranks: of all that the step is dealt to.
        samples: their numbers in the step, in the order of the row; none: the ranks have no work,
            and compute an empty micro batch.
        seconds: by the cost.
    """

    ranks: range
    samples: tuple[int, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class DealtStep:
    """What every rank computes in one step.

    Args:
        micro_batches: of each its groups, which have every rank once, in order.
    """

    micro_batches: tuple[tuple[DealtGroup, ...], ...]

    @property
    def groups(self) -> Iterator[DealtGroup]:
        return (group for groups in self.micro_batches for group in groups)

    @property
    def seconds(self) -> float:
        """Of the slowest group of each micro batch, summed: ranks that shard weights wait for each
        other in every layer."""
        return sum(max(group.seconds for group in groups) for groups in self.micro_batches)

    def cuts(self, lengths: Sequence[int]) -> int:
        """Tokens, each counted once for every rank beside the first one of its group."""
        sizes = ((len(group.ranks) - 1, group.samples) for group in self.groups)
        return sum(more * sum(lengths[i] for i in samples) for more, samples in sizes)

    def group_of(self, micro_batch: int, rank: int) -> DealtGroup:
        return next(x for x in self.micro_batches[micro_batch] if rank in x.ranks)


@dataclass(frozen=True)
class Dealer:
    """Deals samples to ranks; the same on every rank that is given the same lengths.

    Args:
        world: ranks.
        max_tokens: that a rank can hold in one micro batch.
        cost: of a sample in a group; :func:`ds_usp.planner.sample_cost` makes one of a model and a
            cluster.
        sizes: of groups; empty: :func:`group_sizes`. At most :data:`MOST_SIZES`.
        micro_batches: of every step; 0: as few as its samples need.

    Raises:
        ConfigError: a number below 1, sizes that are no sizes of groups, or too many.
    """

    world: int
    max_tokens: int
    cost: Cost = SampleCost()
    sizes: tuple[int, ...] = ()
    micro_batches: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(self.sizes) or group_sizes(max(self.world, 1)))
        numbers = {"world": self.world, "max_tokens": self.max_tokens}
        numbers |= {"micro_batches": self.micro_batches or 1}
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r} must be a whole number of 1 or more")
        fit = all(isinstance(x, int) and 1 <= x <= self.world for x in self.sizes)
        if not fit or len(set(self.sizes)) < len(self.sizes) or len(self.sizes) > MOST_SIZES:
            raise ConfigError(
                f"sizes={self.sizes} must be at most {MOST_SIZES} different sizes of groups, of 1 "
                f"to {self.world} ranks: a rank has a group of each, with communicators of its own"
            )
        object.__setattr__(self, "sizes", tuple(sorted(self.sizes)))

    @property
    def longest(self) -> int:
        """Tokens of the longest sample that the ranks can hold together."""
        return self.sizes[-1] * self.max_tokens

    def deal(self, lengths: Sequence[int]) -> DealtStep:
        """Which ranks compute which samples: the step of fewest seconds that was found, among
        equal ones that which cuts fewest tokens. No slower than any step whose groups have one
        size, dealt in the same way.

        Raises:
            DataError: no sample, an empty one, or one that is too long; more samples than the
                ``micro_batches`` hold.
        """
        self._check(lengths)
        steps = list(self._dealt(lengths, self.sizes))
        for size in self.sizes if len(self.sizes) > 1 else ():
            # Not tried where perfect balance would be slower than what was found.
            least = min((step.seconds for step in steps), default=_NO_LIMIT)
            work = sum(self.cost(x, size) - self.cost(0, size) for x in lengths)
            if max(lengths) <= size * self.max_tokens and work * size < least * self.world:
                steps += self._dealt(lengths, (size,))
        if not steps:
            raise DataError(self._why_not(lengths))
        best = min(steps, key=lambda x: (x.seconds, x.cuts(lengths), len(x.micro_batches)))
        idle = tuple(DealtGroup(range(rank, rank + 1)) for rank in range(self.world))
        missing = max(0, self.micro_batches - len(best.micro_batches))
        return DealtStep(best.micro_batches + (idle,) * missing)

    def _check(self, lengths: Sequence[int]) -> None:
        if not lengths or min(lengths) < 1:
            raise DataError(
                f"a step of {len(lengths)} samples, the shortest of "
                f"{min(lengths, default=0)} tokens: there must be one or more, none empty"
            )
        longest = max(lengths)
        if longest > self.longest:
            raise DataError(
                f"sample {list(lengths).index(longest)} of the step has {longest} tokens: "
                f"{self.sizes[-1]} ranks, the largest group, hold {self.longest} with "
                f"max_tokens={self.max_tokens}. Cut it to {self.longest} tokens, use max_tokens="
                f"{-(-longest // self.sizes[-1])} if memory allows, or more ranks"
            )

    def _why_not(self, lengths: Sequence[int]) -> str:
        if min(lengths) < self.sizes[0]:
            return (
                f"sample {list(lengths).index(min(lengths))} of the step has {min(lengths)} "
                f"tokens, fewer than the {self.sizes[0]} ranks of the smallest group: add 1 to "
                "sizes"
            )
        held = self.micro_batches * self.world * self.max_tokens
        return (
            f"{len(lengths)} samples of {sum(lengths)} tokens do not fit into {self.micro_batches} "
            f"micro batches of {self.world} ranks x max_tokens={self.max_tokens}, {held} tokens, "
            "each sample whole in one group: raise micro_batches (0: as many as a step needs) or "
            "max_tokens, or take fewer samples a step"
        )

    def _dealt(self, lengths: Sequence[int], sizes: tuple[int, ...]) -> Iterator[DealtStep]:
        """A step for each number of micro batches that is tried."""
        table = _Table(self, lengths, sizes)
        fewest = -(-sum(lengths) // (self.world * self.max_tokens))
        most = self.micro_batches or len(lengths)
        for count in range(fewest, most + 1):
            if table.deal(range(len(lengths)), count, _NO_LIMIT) is not None:
                last = min(count + _MORE_MICRO_BATCHES, most)
                steps = (table.shortest(x) for x in range(count, last + 1))
                return (step for step in steps if step is not None)
        return iter(())


@dataclass(slots=True)
class _OpenGroup:
    ranks: range
    size: int
    seconds: float
    tokens: int
    samples: list[int]


class _Table:
    """The samples of a step and what each costs on each size of group."""

    def __init__(self, dealer: Dealer, lengths: Sequence[int], sizes: Sequence[int]) -> None:
        self._world, self._lengths, self._sizes = dealer.world, lengths, sizes
        self._capacity = {size: size * dealer.max_tokens for size in sizes}
        self._start = {size: dealer.cost(0, size) for size in sizes}
        # Packed samples are summed, and a micro batch starts once.
        costs = {
            tokens: {size: dealer.cost(tokens, size) - self._start[size] for size in sizes}
            for tokens in sorted(set(lengths))
        }
        self._costs = [costs[tokens] for tokens in lengths]
        self._groups = {size: groups_of_size(dealer.world, size) for size in sizes}

    def shortest(self, count: int) -> DealtStep | None:
        """The shortest step of so many micro batches that a search for a time limit finds: first a
        limit for all of them, then for each its own."""
        everything = range(len(self._lengths))
        dealt = self._bisect(everything, count)
        if dealt is None:
            return None
        micro_batches = []
        for groups in dealt:
            own = sorted(i for group in groups for i in group.samples)
            # What was first found stays if no shorter one is.
            alone = self._bisect(own, 1) if own else None
            slowest = max((group.seconds for group in groups), default=0.0)
            shorter = alone and max(group.seconds for group in alone[0]) < slowest
            if own:
                micro_batches.append(self._with_idle(alone[0] if alone and shorter else groups))
        return DealtStep(tuple(micro_batches))

    def _bisect(self, samples: Iterable[int], count: int) -> list[list[_OpenGroup]] | None:
        samples = list(samples)
        best = self.deal(samples, count, _NO_LIMIT)
        if best is None:
            return None
        high = max(group.seconds for groups in best for group in groups)
        # No limit below these is kept: the ranks' work in the mean, the longest sample, with the
        # start of the micro batch.
        least = [min(self._costs[i].items(), key=lambda x: x[0] * x[1]) for i in samples]
        low = sum(size * cost for size, cost in least) / (self._world * count)
        low = max(low, *(min(self._costs[i].values()) for i in samples))
        low += min(self._start.values())
        ahead = 2 * _CLOSE  # most steps end little above the bound: a half of the way is too far
        while high - low > _CLOSE * high:
            limit = min((low + high) / 2, low * (1 + ahead))
            dealt = self.deal(samples, count, limit)
            if dealt is None:
                low, ahead = limit, 2 * ahead
            else:
                best, high = dealt, max(x.seconds for groups in dealt for x in groups)
        return best

    # Note [how a step is dealt]
    # With a time limit for a micro batch, each sample has a smallest group in which it ends in time
    # and has memory. Longest first, samples are put into a group of that size that is open and has
    # tokens left, else one is opened, else they take a larger one: first fit by decreasing length.
    # Bisecting the limit makes it the shortest (MULTIFIT: Coffman, Garey and Johnson 1978; for
    # groups of one rank at most 13/11 of the optimum). A lower limit cuts long samples further, and
    # a higher one leaves them whole: how far to cut follows from the balance.
    def deal(
        self, samples: Iterable[int], count: int, limit: float
    ) -> list[list[_OpenGroup]] | None:
        """The groups of ``count`` micro batches that end in time; None if some sample does not
        fit."""
        opened: list[list[_OpenGroup]] = [[] for _ in range(count)]
        free = [dict(self._groups) for _ in range(count)]
        for i in sorted(samples, key=lambda i: (-self._lengths[i], i)):
            if not self._place(i, opened, free, limit):
                return None
        return opened

    def _place(
        self,
        i: int,
        opened: list[list[_OpenGroup]],
        free: list[dict[int, tuple[range, ...]]],
        limit: float,
    ) -> bool:
        tokens, costs = self._lengths[i], self._costs[i]
        for size in self._sizes:
            cost, most = costs[size], self._capacity[size] - tokens
            before = limit - cost
            if most < 0 or self._start[size] > before:
                continue
            for groups, ranks_left in zip(opened, free, strict=True):
                for group in groups:
                    if group.size == size and group.tokens <= most and group.seconds <= before:
                        group.tokens += tokens
                        group.seconds += cost
                        group.samples.append(i)
                        return True
                if ranks_left[size] and tokens >= size:  # each rank needs a token
                    own = ranks_left[size][0]
                    groups.append(_OpenGroup(own, size, self._start[size] + cost, tokens, [i]))
                    for other, of_size in ranks_left.items():
                        ranks_left[other] = tuple(
                            x for x in of_size if x.stop <= own.start or own.stop <= x.start
                        )
                    return True
        return False

    def _with_idle(self, groups: list[_OpenGroup]) -> tuple[DealtGroup, ...]:
        """With the ranks that have no work, each alone."""
        dealt = [DealtGroup(x.ranks, tuple(sorted(x.samples)), x.seconds) for x in groups]
        busy = {rank for group in groups for rank in group.ranks}
        dealt += (DealtGroup(range(r, r + 1)) for r in range(self._world) if r not in busy)
        return tuple(sorted(dealt, key=lambda group: group.ranks.start))
