"""Consistency check: ranks compare what they are about to do, so that those that differ raise
instead of hanging. Attention, recurrences and enabled models ask the checker of their mesh before
each call and backward pass, on every rank in one order: a comparison is collective, on CPUs."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import hashlib
import math
import os
import sys
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ds_usp.comm.call_record import (
    MAIN_THREAD,
    NUMBERS_FIELD,
    ONE_THREAD,
    RECORD_BYTES,
    THREAD_FIELD,
    CallRecord,
    Kind,
    Signature,
    mismatch_error,
)
from ds_usp.comm.process_groups import (
    all_gather_bytes,
    ask_store,
    subgroup,
    timeout_of,
    transport_device,
)
from ds_usp.comm.shm_mailbox import (
    MAX_IN_FLIGHT,
    WARN_AFTER_S,
    ShmMailbox,
    open_mailbox,
    warn_of_late_ranks,
)
from ds_usp.errors import MeshError

# Comparisons, of calls and backward passes, after which numbers leave the GPU, and as many again
# before they are read: a GPU has long computed what it was given before.
_READ_AFTER = 16
_FEW_ELEMENTS = 1024  # a larger tensor is compared by sums, of as many elements each
_ROWS = 4096  # of _FEW_ELEMENTS, summed at a time: 32 MiB of products
# By bytes; elements of 8 bytes as pairs of int32: an int64 sum would keep their top bits' parity.
INTEGERS = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32})
_EARLIER_FIELD = f"{NUMBERS_FIELD}earlier calls "  # begins that of their digest and checksums
_MAX_NAMED = 4  # of those that differ
_PLAIN_TENSORS = torch.Tensor, torch.nn.Parameter
# Signatures may differ from step to step, by lengths or by documents.
_MAX_VERIFIED = 1024
# Records of calls recur; those of backward passes, with their number, do not.
_encode = lru_cache(maxsize=_MAX_VERIFIED)(CallRecord.encode)
_CALL = Kind.CALL  # an enum's lookup takes longer
_MIN_POLL_S, _MAX_POLL_S = 2e-5, 2e-3  # of a wait over a group
_LOOK_S = 1.0  # between two requests to the store, in a wait over a group
_EXIT_TIMEOUT_S = 5.0  # how long a process that ends waits for what it has started over one group
_FAILED_FOR_GOOD = (
    "The mesh has failed for good: make a new one on every rank, SequenceMesh.from_group(...), and "
    "enable(model, mesh) again, which keeps weights and optimizer; a USPAttention is made anew. Or "
    "start again from the last checkpoint"
)
_FORKED = MeshError(
    "this process was forked from a rank of the mesh and is none itself: call the model in ranks, "
    "which torchrun or multiprocessing's spawn starts"
)


class SharedNumbers:
    """A copy of tensors that are equal on all ranks, or of sums in which each bit of them counts.

    Args:
        tensors: by name, all on one device; other classes than torch's own by their shapes alone.

    Attributes:
        names: the field of each tensor's dtype and shape.
        is_on_gpu: the numbers are not known before the GPU has computed what it was given so far.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        names: list[str] = []
        parts: list[torch.Tensor] = []
        self._ends, self.is_on_gpu = [0], False
        for name, x in tensors.items():
            names.append(_name_of(name, x.dtype, x.shape))
            is_known = type(x) in _PLAIN_TENSORS and not x.is_meta
            # Replays of a CUDA graph compare nothing.
            if is_known and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
                parts.append(_compared_bytes(x))
                self.is_on_gpu = x.is_cuda
            self._ends.append(sum([part.numel() for part in parts]))
        self.names = tuple(names)
        # A copy, of one tensor too: what it was taken from may be written to before it is read.
        self._bits = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device="cpu")
        self._stream: tuple[int, int, int] | None = None
        self._arrival: torch.cuda.Event | None = None
        self._host: memoryview | None = None
        if self.is_on_gpu:  # as torch.cuda.current_stream() does, which takes a few times as long
            self._stream = torch._C._cuda_getCurrentStream(self._bits.get_device())

    @staticmethod
    def copy_to_host(several: Sequence[SharedNumbers]) -> None:
        """Start the copies of several to the host, behind the GPU's work: one for each stream.
        Their :meth:`parts` must be read in this order."""
        names = "stream_id", "device_index", "device_type"
        for key in dict.fromkeys(x._stream for x in several):
            stream_numbers, start = [x for x in several if x._stream == key], 0
            stream = torch.cuda.Stream(**dict(zip(names, key, strict=True))) if key else None
            with torch.cuda.stream(stream):
                bits = torch.cat([x._bits for x in stream_numbers]).to("cpu", non_blocking=True)
                stream_numbers[0]._arrival = stream.record_event() if stream else None  # read first
            host = bits.numpy().data
            for x in stream_numbers:
                x._bits, x._host = bits, host[start : start + x._ends[-1]]
                start += x._ends[-1]

    def parts(self) -> list[memoryview]:
        """The bits of each tensor, on the CPU; after :meth:`copy_to_host` it waits for the GPU."""
        if self._arrival is not None:
            self._arrival.synchronize()
        data = self._bits.numpy().data if self._host is None else self._host
        return [data[start:end] for start, end in pairwise(self._ends)]

    def fields(self) -> tuple[str, ...]:
        """The field of each tensor's numbers."""
        named = zip(self.names, self.parts(), strict=True)
        return tuple([f"{name}, digest: {_digest([part])}" for name, part in named])


def _digest(parts: Iterable[memoryview]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


@lru_cache(maxsize=1024)
def _name_of(name: str, dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{NUMBERS_FIELD}{dtype} {name} {'x'.join(map(str, shape))}"


def _compared_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes, or those of at most 1,024 sums that one changed element changes."""
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    if x.ndim != 1 or not x.is_contiguous():
        x = x.contiguous().view(-1)
    if x.numel() <= _FEW_ELEMENTS:
        return x.view(torch.uint8)
    # Sums of integers wrap around: they are exact in any order, so that unlike GPUs agree. The
    # factors are odd: no single bit is lost in them.
    bits = x.view(INTEGERS[min(x.element_size(), 4)])
    level = 0
    while len(bits) > _FEW_ELEMENTS:
        if len(bits) % _FEW_ELEMENTS:
            bits = torch.nn.functional.pad(bits, (0, -len(bits) % _FEW_ELEMENTS))
        factors = _factors(bits.device, level)
        rows = bits.view(-1, _FEW_ELEMENTS).split(_ROWS)
        sums = [(piece * factors).sum(1) for piece in rows]
        bits, level = sums[0] if len(sums) == 1 else torch.cat(sums), level + 1
    return bits.view(torch.uint8)


@lru_cache(maxsize=64)
def _factors(device: torch.device, level: int) -> torch.Tensor:
    """Odd integers without a pattern, others for sums of elements and for sums of sums."""
    index = torch.arange(1, 1 + _FEW_ELEMENTS, device=device) + level * _FEW_ELEMENTS
    factors = index * 0x1E3779B97F4A7C15
    factors = (factors ^ (factors >> 29)) | 1
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # once: any stream may read them next
    return factors


class _Call(NamedTuple):
    """A call on a GPU, whose numbers are still to be compared."""

    number: int
    signature: Signature
    numbers: SharedNumbers


class GroupTransport:
    """Records by asynchronous all-gathers over a process group, with the methods of
    :class:`ShmMailbox`. Each number is gathered once; zeros follow a record.

    Args:
        store: a part of the job's that is new for each mesh. An all-gather does not show whom it
            waits for, and where a rank has ended it fails on its neighbours alone: ranks that wait
            longer than a second say in the store that they have come, and those whose wait has
            failed that they have given up. None: nobody knows which ranks are late.
    """

    def __init__(self, group: dist.ProcessGroup, store: dist.Store | None = None) -> None:
        self._group, self._store = group, store
        self._posted, self._given_up = 0, ""
        self._works: dict[int, tuple[dist.Work, list[bytearray]]] = {}
        self._requests: list[threading.Thread] = []  # to the store, that may not have ended
        # torch aborts a process that ends and leaves a collective or a request to the store behind.
        # Not when the transport is garbage collected, which may be in mid-training.
        atexit.register(_wait_for, self._works, self._requests)

    def post(self, data: bytes) -> int:
        self._posted += 1
        local = torch.frombuffer(bytearray(data.ljust(RECORD_BYTES, b"\0")), dtype=torch.uint8)
        received = [bytearray(RECORD_BYTES) for _ in range(self._group.size())]
        out = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in received]
        self._works[self._posted] = self._group.allgather([out], [local]), received
        return self._posted

    def gather(self, seq: int) -> list[bytearray]:
        work, received = self._works.pop(seq)
        start, ended, waited_s = time.monotonic(), threading.Event(), 0.0
        try:
            while not work.is_completed():
                waited_s = time.monotonic() - start
                if waited_s > _LOOK_S:
                    self._look_at_store(seq, ended)
                if self._given_up:
                    raise MeshError(f"other ranks have given the mesh up: {self._given_up}")
                time.sleep(min(max(0.1 * waited_s, _MIN_POLL_S), _MAX_POLL_S))
            work.wait()
        except RuntimeError as error:
            failure = "has ended, cannot be reached, or has made no call"
            rank = f"while rank {self._group.rank()} waited {waited_s:.1f} s"
            raise MeshError(f"another rank of the mesh {failure}, {rank}: {error}") from None
        finally:
            ended.set()
        return received

    def abort(self) -> None:
        if (store := self._store) is not None:
            rank = f"by rank {self._group.rank()}"
            self._requests.append(ask_store(lambda: store.set("given up", rank)))
            self._requests[-1].join(_LOOK_S)  # where its host is gone, the others' waits fail

    def _look_at_store(self, seq: int, ended: threading.Event) -> None:
        """Start a thread, unless one runs, that says in the store that this rank waits, and looks
        who is late or has given up, until ``ended``."""
        store, ranks = self._store, range(self._group.size())
        if store is None or any(thread.is_alive() for thread in self._requests):
            return

        def look() -> None:
            start, warned = time.monotonic() - _LOOK_S, False
            store.set(f"{seq} {self._group.rank()}", "has come")
            while not ended.wait(_LOOK_S):
                if store.check(["given up"]):
                    self._given_up = store.get("given up").decode()
                waited_s = time.monotonic() - start
                if waited_s > WARN_AFTER_S and not warned:
                    warned = True
                    late = [rank for rank in ranks if not store.check([f"{seq} {rank}"])]
                    warn_of_late_ranks(late, waited_s, timeout_of(self._group).total_seconds())

        self._requests[:] = [ask_store(look)]  # this wait ends at the group's timeout all the same


def _wait_for(
    works: Mapping[int, tuple[dist.Work, list[bytearray]]], requests: Sequence[threading.Thread]
) -> None:
    """Wait for all-gathers, which other ranks may still join, and for requests to the store."""
    deadline = time.monotonic() + _EXIT_TIMEOUT_S
    for work, _ in works.values():
        left = datetime.timedelta(seconds=max(0.001, deadline - time.monotonic()))
        with contextlib.suppress(RuntimeError):
            work.wait(left)
    for thread in requests:
        thread.join(max(0.0, deadline - time.monotonic()))


# Note [every rank compares]
#
# Ranks that make different calls wait for messages that never come, or take each other's for their
# own. All ranks must find out: one that continues alone posts an exchange that nobody answers. So
# each gathers every record and comes to the same result by itself; none decides for the others. The
# n-th comparison that did not fail is the same on all ranks, so its number names the call: backward
# passes declare the call they belong to, and ranks that run them in other orders differ in it.
#
# Note [deferred comparison]
#
#   CPU   call 1 compare....launch | call 2 post, launch | call 3 post, launch | ... read 2, 3
#   GPU                      call 1 ........................ call 2 ........... call 3 ........
#
# Where tensors are on CPUs, and for every signature that is new, the ranks wait for the comparison
# before anything moves. Waiting at each call would end the CPU's run ahead of the GPU. So on GPUs a
# signature that was equal before is compared while the call runs, and the result is read when a
# later call or a backward pass begins: after a number of calls, not a time, so that all ranks raise
# at the same call. No CUDA stream waits for it.
#
# Numbers of tensors that are equal on all ranks, as sinks, are compared by content in each call. A
# call on a GPU copies their bits, or sums of many, and no more, as each operation costs the host
# time. Those of sixteen comparisons go to the host together, and sixteen later their digest is one
# field of one record, of a call or a backward pass, or of a check: reading them at once would let
# the GPU run empty in each layer. Where that is refused for another reason, the next one has them.
#
# Note [fail-stop]
#
#   rank 0    call 6 | call 7: compare ...... MeshError, for good
#   rank 1    call 6 | out of memory: declares in the place of 7 that it has left
#
# What is refused before anything moved is refused on all ranks at one comparison, and all can go
# on. Nothing else is mended: where some ranks have started an exchange that others refuse, or one
# has left a pass alone, messages would never come, and the mesh has failed for good on every rank.
# A rank that leaves says so in the place of its next comparison and waits for nobody; it reads the
# others' records of that number before it compares again. Where all ranks have left there, nothing
# is in flight, and they go on. A rank that ends is found by the transport.
#
# Note [one thread]
#
# Two threads that compute come in another order on each rank, and their calls look equal. So a mesh
# belongs to the thread that computes first until that has ended, and its name is compared: nothing
# else shows which threads of two processes belong together. Backward passes are compared by the
# number of their call, whichever of autograd's threads runs them and recomputes calls there.
class ConsistencyChecker:
    """Compares the ranks' signatures of each call and each backward pass, on the CPU.

    Args:
        group: the ranks, over a CPU backend; None is one process alone.
        mailbox: shared memory of all of them, which is faster; None: all-gathers over the group, in
            which nothing else may come between them.
        store: of :class:`GroupTransport`.

    Attributes:
        number: comparisons so far, less failed ones; after :meth:`check_call`, that call's number.
        ranks_know: all ranks raise what this one raises: its last comparison failed on all of them.
        in_pass: a pass of attention runs, or an error has ended it: exchanges may be in flight.
        num_exchanges: returns how many exchanges this rank's copy engines have started.
        on_failure: called once when the mesh has failed for good.
        refuse_backward: returns why no gradient could be right; asked at each backward pass.
    """

    # attributes                          written by, and under        read by
    # number, _failure, _calls, _passes,  comparisons, _lock           the next comparison; number:
    #   _passes_since_call, _verified,                                 the call it is of
    #   _pending, _unread, _arriving, _read,
    #   _has_left
    # ranks_know                          comparisons; who begins      who has caught an error
    #                                     what may raise before one
    # _owner, _thread_field               a thread's first call, _lock calls, _lock
    # in_pass, _aborted_passes,           attention's passes, in the   comparisons
    #   _exchanges_at_abort               thread that runs them
    # on_failure, num_exchanges,          the mesh, when it is made    comparisons
    #   refuse_backward
    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        mailbox: ShmMailbox | None = None,
        store: dist.Store | None = None,
    ) -> None:
        self.group, self.mailbox = group, mailbox
        self.number, self.ranks_know = 0, False
        self._calls = self._passes = self._passes_since_call = 0  # backward passes
        self._verified: set[Signature | str] = set()  # signatures that were equal on all ranks
        self._pending: deque[int] = deque()  # comparisons in flight
        self._unread: list[_Call] = []  # whose numbers are on the GPU
        self._arriving: deque[list[_Call]] = deque()  # whose numbers are on their way to the host
        self._read: dict[int, list[_Call]] = {}  # whose digests a comparison's record has
        self._has_left = False  # the last one in flight says so
        self._failure: MeshError | None = None  # raised as copies: it would keep frames
        self._owner: weakref.ref[threading.Thread] | None = None
        self._thread_field: tuple[str, ...] = ()
        self.in_pass, self._aborted_passes, self._exchanges_at_abort = False, 0, 0
        self.on_failure: Callable[[], object] = lambda: None
        self.num_exchanges: Callable[[], int] = lambda: 0
        self.refuse_backward: Callable[[], Exception | None] = lambda: None
        self._lock = threading.RLock()
        self._transport: ShmMailbox | GroupTransport | None = mailbox
        if group is not None and mailbox is None:
            self._transport = GroupTransport(group, store)

    @classmethod
    def for_mesh(cls, group: dist.ProcessGroup, nodes: Sequence[bytes]) -> ConsistencyChecker:
        """The checker of a group, by its backends and each rank's node. Collective over it."""
        # Nothing else may come between comparisons, of which several are in flight: a mailbox, or a
        # group of its own. Where gloo alone serves CPU and CUDA tensors, there is one backend.
        backends = {type(group._get_backend(device)) for device in group._device_types}
        gloo = transport_device(group).type == "cpu" and len(backends) == 1
        if gloo and (mailbox := open_mailbox(group, nodes)) is not None:
            return cls(group, mailbox)
        control = subgroup(group, dist.get_process_group_ranks(group), backend="gloo")
        if control is None:
            return cls()
        if not gloo and (mailbox := open_mailbox(control, nodes)) is not None:
            return cls(control, mailbox)
        # A job that is started again may find what its ranks have stored before.
        name = f"ds_usp {all_gather_bytes(os.urandom(8), control)[0].hex()}"
        try:  # a connection of its own: on others a rank may wait for a key
            store: Any = c10d._get_default_store()
            return cls(control, None, dist.PrefixStore(name, store.clone()))
        except (AttributeError, RuntimeError):  # an older torch, a store of one process
            return cls(control)

    # ------------------------------------------------------------------ what ranks compare

    def check_call(
        self,
        signature: Signature | str,
        *,
        error: Exception | None = None,
        wait: bool = True,
        numbers: SharedNumbers | None = None,
    ) -> None:
        """Compare this call with the other ranks'. Its number is :attr:`number` then.

        Args:
            signature: of the call; a text has ``", "`` between its fields.
            error: what this rank already knows to be wrong.
            wait: wait for the comparison even if the signature was equal on all ranks before, as
                on a CPU; else its result may be raised by a later call.
            numbers: of arguments that are no shards. On a GPU they are compared at most 32
                comparisons later.

        Raises:
            MeshError: the ranks differ in this call or differed in an earlier one; on every rank.
            Exception: ``error`` itself, on the rank that passed it.
        """
        # A comparison may take milliseconds, so several are in flight.
        if isinstance(signature, str):
            signature = Signature.of_text(signature)
        posted = signature
        if numbers is not None:
            fields = numbers.names if numbers.is_on_gpu else numbers.fields()
            posted = Signature(signature.fields + fields, signature.layouts)
        # New numbers make no new signature, which would be waited for.
        self._compare(posted, _CALL, signature, error, wait, MAX_IN_FLIGHT - 1, computes=True)
        if numbers is not None and numbers.is_on_gpu:  # not of a call that all ranks refuse
            self._unread.append(_Call(self.number, signature, numbers))
        self._calls += 1
        self._passes_since_call = 0

    def check_part(self, text: str, *, wait: bool = True) -> None:
        """:meth:`check_call` in the middle of a call, which it is part of."""
        signature = Signature((text,))
        self._compare(signature, _CALL, text, None, wait, MAX_IN_FLIGHT - 1, computes=True)

    def check_backward(self, call: int, part: str = "", *, wait: bool = True) -> None:
        """Compare the backward pass that begins with the other ranks', after all calls that came
        before it.

        Args:
            call: the number of its forward call.
            part: which of several passes of that call, a text that follows its number.
            wait: wait for the comparison even if this ``part`` of another call was compared before.

        Raises:
            MeshError: the ranks differ in this pass or in an earlier call; on every rank.
        """
        signature = Signature((f"backward pass of call {call}{part}",))
        # The call's number is new each time: verified is that passes were compared before.
        key = f"backward pass{part}"
        max_pending = min(self._passes_since_call, MAX_IN_FLIGHT - 1)
        self._compare(signature, Kind.BACKWARD, key, self.refuse_backward(), wait, max_pending)
        self._passes += 1
        self._passes_since_call += 1

    def check_now(self, text: str, error: Exception | None = None) -> None:
        """:func:`check_same` over this group, after all comparisons in flight."""
        signature = Signature.of_text(text)
        # Without numbers of earlier calls: callers ask for the reason where the text differs.
        self._compare(signature, _CALL, signature, error, True, 0, read_after=math.inf)

    def check(self) -> None:
        """Compare how many calls and backward passes each rank has made. Collective; it takes a
        number of the comparisons, as a call does, and reads those in flight first.

        Raises:
            MeshError: other numbers, or a rank is about to do something else; on every rank.
        """
        counts = f"after {self._calls} calls", f"after {self._passes} backward passes"
        signature = Signature(("a check of the mesh", *counts))
        self._compare(signature, _CALL, signature, None, True, 0, read_after=0)

    @contextlib.contextmanager
    def raising_everywhere(self) -> Iterator[None]:
        """Raise on every rank what the body raises on one: all compare something right after it."""
        self.ranks_know = False
        try:
            yield
        except Exception as error:
            self.raise_everywhere(error)
            raise

    def raise_everywhere(self, error: Exception) -> None:
        """Pass what this rank has raised to the comparison in which the others wait, unless they
        know: a comparison has failed since :attr:`ranks_know` was set to False."""
        if not self.ranks_know and self._failure is None:
            self.check_call("", error=error)

    # ------------------------------------------------------------------ passes that are left

    @contextlib.contextmanager
    def forward_pass_of(self, name: str) -> Iterator[None]:
        """A part of a model's forward pass; an error in it is declared to the others."""
        try:
            yield
        except Exception as error:
            self.leave_forward_pass(name, error)
            raise

    def leave_forward_pass(self, name: str, error: BaseException | None) -> None:
        """Declare in the place of the next comparison that an error (None: unknown) takes this rank
        out of a pass, without waiting; not where the others know, by a comparison or by this."""
        with self._lock:
            already_known = self.ranks_know or self._has_left or self._failure is not None
            if self._transport is None or already_known:
                return
            reason = "" if error is None else f": {type(error).__name__}: {error}"
            signature = Signature((f"it has left a forward pass of {name}{reason}",))
            self.abort_pass()
            record = self._record(signature, Kind.LEFT)
            self._pending.append(self._transport.post(record.encode()))
            self._has_left = True

    def abort_pass(self, exchanges: int = 0) -> None:
        """Count that an error has ended the pass that runs, if one does, after so many exchanges.
        Ranks go on only where all have left the same pass after equally many exchanges."""
        if self.in_pass:
            self.in_pass = False
            self._aborted_passes += 1
            self._exchanges_at_abort = self.num_exchanges() + exchanges

    # ------------------------------------------------------------------ failure

    @property
    def has_failed(self) -> bool:
        """Every later call raises."""
        return self._failure is not None

    def refuse_forked_process(self) -> None:
        """Let each call raise in a child that was forked, which is no rank."""
        self._lock = threading.RLock()  # another thread of the parent may have held it
        if self._transport is not None:
            self._failure = _FORKED

    def clear_verified(self) -> None:
        """Let every signature be waited for again. On all ranks at the same call."""
        self._verified.clear()

    def drain(self, max_pending: int = 0) -> None:
        """Wait until at most so many comparisons are in flight; MeshError if the ranks differed in
        an earlier call."""
        with self._lock:
            if self._failure is not None:
                raise copy(self._failure)
            transport = cast("ShmMailbox | GroupTransport", self._transport)
            while len(self._pending) > (0 if self._has_left else max_pending):
                self._gather_and_compare(transport, self._pending.popleft())
                self._has_left &= bool(self._pending)

    def _fail(self, error: MeshError) -> MeshError:
        """Every later call raises what is returned; streams that wait for ranks are released."""
        message = f"{error}\n{_FAILED_FOR_GOOD}"
        self._failure = MeshError(message, error.signatures, error.layouts)
        self.on_failure()
        return copy(self._failure)

    # ------------------------------------------------------------------ a comparison

    def _compare(
        self,
        signature: Signature,
        kind: Kind,
        key: Signature | str,
        error: Exception | None,
        wait: bool,
        max_pending: int,
        computes: bool = False,
        read_after: float = _READ_AFTER,
    ) -> None:
        """Compare a record; without waiting if its key is verified and ``wait`` is False. Counts it
        in :attr:`number`, unless it raises.

        Args:
            key: is verified once a comparison with it was waited for and found equal.
            error: this rank's own, which its record then declares.
            max_pending: at most so many comparisons are in flight before this one.
            computes: the mesh becomes this thread's, or belongs to it.
            read_after: numbers of calls leave the GPU where the first was so many comparisons
                before, and are part of the record after twice as many.
        """
        transport = self._transport
        if transport is None:
            if error is not None:
                raise error
            return
        with self._lock:
            if computes and torch._C._current_graph_task_id() == -1:
                if self._owner is None or self._owner() is not threading.current_thread():
                    error = self.take_thread() or error
                if self._thread_field:
                    signature = Signature.of(signature, *self._thread_field)
            wait = wait or error is not None or key not in self._verified
            if self._pending or self._failure is not None:
                self.drain(0 if wait else max_pending)
            if self.in_pass and error is None and (computes or kind is Kind.BACKWARD):
                self.abort_pass()  # else another thread may be in it
            calls = self._read_numbers(read_after) if self._unread or self._arriving else []
            if calls:
                fields = (*signature.fields, _earlier_field(calls))
                signature = Signature(fields, signature.layouts)
            record = self._record(signature, kind, deferred=not wait)
            seq = transport.post(_encode(record if error is None else _error_record(error)))
            self.ranks_know = False
            if calls:
                self._read[seq] = calls
            if not wait:
                self._pending.append(seq)
            else:
                self._gather_and_compare(transport, seq, error)
                if len(self._verified) >= _MAX_VERIFIED:  # at the same call on every rank
                    self._verified.clear()
                self._verified.add(key)
            # Not if it failed: ranks that catch the error continue with one number.
            self.number += 1

    def _gather_and_compare(
        self, transport: ShmMailbox | GroupTransport, seq: int, error: Exception | None = None
    ) -> None:
        """Compare all ranks' records of comparison ``seq``; this rank has posted its own.

        Raises:
            MeshError: records differ, a rank has ended, or one cannot be reached.
            Exception: ``error``, this rank's own, where it has one and all records came.
        """
        try:
            data: Sequence[bytes | bytearray] = transport.gather(seq)
        except MeshError as unreachable:
            transport.abort()
            raise self._fail(unreachable) from None
        calls = self._read.pop(seq, []) if self._read else []
        if error is None and data.count(data[0]) == len(data):
            return
        difference, for_good, unequal_calls = _difference(data, calls)
        if difference is not None and for_good:
            difference = self._fail(difference)
        raised = difference if error is None else error
        if raised is not None:
            self.ranks_know = True
            if unequal_calls:
                self._unread.clear()  # on every rank: it would be refused for these again
                self._arriving.clear()
            elif calls:
                self._arriving.appendleft(calls)
            raise raised

    def _read_numbers(self, read_after: float) -> list[_Call]:
        """Take the calls whose numbers are part of the record of the comparison that begins, and
        start the copies of those that are to leave the GPU (``read_after`` of :meth:`_compare`)."""
        calls: list[_Call] = []
        copy_to, read_to = [self.number + 1 - times * read_after for times in (1, 2)]  # calls
        copies = bool(self._unread) and self._unread[0].number <= copy_to
        reads = bool(self._arriving) and self._arriving[0][0].number <= read_to
        # A wait for the GPU ends the capture of a CUDA graph: read after it, on every rank.
        if not (copies or reads) or torch.cuda.is_current_stream_capturing():
            return calls
        if copies:
            SharedNumbers.copy_to_host([call.numbers for call in self._unread])
            self._arriving.append(self._unread)
            self._unread = []
        while self._arriving and self._arriving[0][0].number <= read_to:
            calls += self._arriving.popleft()
        return calls

    def _record(self, signature: Signature, kind: Kind, deferred: bool = False) -> CallRecord:
        """A record with this rank's aborted passes: it must not continue with ranks that have
        aborted no pass, or other passes."""
        aborted = self._aborted_passes, self._exchanges_at_abort
        return CallRecord(signature, kind, *aborted, deferred)

    def take_thread(self) -> MeshError | None:
        """Make the mesh this thread's; returns why that may not be, None if it is."""
        thread, owner = threading.current_thread(), None if self._owner is None else self._owner()
        if owner is thread:
            return None
        # A thread that C++ has started never ends for Python, but has no frame any more.
        if owner is not None and owner.is_alive() and owner.ident in sys._current_frames():
            return MeshError(
                f"thread {thread.name!r} calls on a mesh whose calls run in thread "
                f"{owner.name!r}, which has not ended. {ONE_THREAD}"
            )
        self._owner, field = weakref.ref(thread), f"{THREAD_FIELD}{thread.name!r}"
        self._thread_field = () if thread.name == MAIN_THREAD else (field,)
        return None


def check_same(group: dist.ProcessGroup | None, text: str, error: Exception | None = None) -> None:
    """Raise on every rank unless all ranks of a group pass the same text and none an error.
    Collective over the group (None: this process alone), before an operation that would hang if its
    ranks differed.

    Args:
        text: what this rank is about to do.
        error: why this rank cannot do it. A rank passes its error here instead of raising it first,
            so that the others do not wait for that rank.

    Raises:
        Exception: ``error``, on a rank that passed one.
        MeshError: on the other ranks; it quotes their errors, or shows in what the texts differ and
            on which ranks.
    """
    record = CallRecord(Signature.of_text(text)) if error is None else _error_record(error)
    data = record.encode().ljust(RECORD_BYTES, b"\0")  # all-gathers need equal lengths
    difference, *_ = _difference([] if group is None else all_gather_bytes(data, group))
    raised = difference if error is None else error
    if raised is not None:
        raise raised


def _error_record(error: Exception) -> CallRecord:
    return CallRecord(Signature((str(error) or type(error).__name__,)), Kind.ERROR)


def _earlier_field(calls: Sequence[_Call]) -> str:
    """One digest, which shows whether the numbers of calls are equal, and a checksum of each tensor
    to find the unequal ones: a record is too short for a digest of each."""
    parts = [part for call in calls for part in call.numbers.parts()]
    return _EARLIER_FIELD + " ".join([_digest(parts), *[f"{zlib.crc32(x):08x}" for x in parts]])


def _name_numbers(
    records: Sequence[CallRecord], calls: Sequence[_Call]
) -> tuple[Sequence[CallRecord], list[_Call]]:
    """The records with fields for the first tensors that differ, in the place of the field of
    :func:`_earlier_field` for ``calls``; and which of these calls the tensors are of."""
    texts = [record.signature.fields[-1] for record in records]
    if not calls or len(set(texts)) == 1 or not all(x.startswith(_EARLIER_FIELD) for x in texts):
        return records, []
    checksums = [text.removeprefix(_EARLIER_FIELD).split(" ")[1:] for text in texts]
    tensors = [(call, f"{x} of call {call.number}") for call in calls for x in call.numbers.names]
    columns = list[Any]()  # a tensor, and each rank's checksum of it
    if all(len(x) == len(tensors) for x in checksums):  # else a record was too short for so many
        columns = [x for x in zip(tensors, *checksums, strict=True) if len(set(x[1:])) > 1]
    if not columns:
        return records, list(calls[:_MAX_NAMED])
    named = list[CallRecord]()
    for rank, record in enumerate(records):
        fields = [f"{name}, checksum: {sums[rank]}" for (_, name), *sums in columns[:_MAX_NAMED]]
        signature = Signature((*record.signature.fields[:-1], *fields), record.signature.layouts)
        named.append(record._replace(signature=signature))
    return named, list(dict.fromkeys(call for (call, _), *_ in columns[:_MAX_NAMED]))


def _difference(
    data: Sequence[bytes | bytearray], calls: Sequence[_Call] = ()
) -> tuple[MeshError | None, bool, list[_Call]]:
    """The difference of the ranks' encoded records of a number, None where all can go on; whether
    it is for good: ranks aborted different passes, one has left alone, or some have started an
    exchange that others refuse; and which of ``calls``, whose digests the records have, differ."""
    if not data or data.count(data[0]) == len(data):
        return None, False, []
    records, unequal = _name_numbers([CallRecord.decode(record) for record in data], calls)
    kinds = {record.kind for record in records}
    aborts = {(x.aborted_passes, x.exchanges) for x in records if x.kind is not Kind.ERROR}
    if kinds == {Kind.LEFT} and len(aborts) == 1:
        return None, False, []
    deferred = any(record.deferred for record in records)
    error = mismatch_error(records, [f"call {call.number}: {call.signature}" for call in unequal])
    return error, deferred or Kind.LEFT in kinds or len(aborts) > 1, unequal
