"""A few bytes from every rank of a group, over whatever the group can send."""

from __future__ import annotations

import torch
import torch.distributed as dist


def all_gather_bytes(data: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """The same number of bytes from every rank."""
    mine = byte_tensor(data, group)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    found = bytearray(len(everyone) * len(data))
    torch.frombuffer(found, dtype=torch.uint8).copy_(torch.cat(everyone))
    return [bytes(found[at : at + len(data)]) for at in range(0, len(found), len(data))]


def byte_tensor(data: bytes, group: dist.ProcessGroup) -> torch.Tensor:
    """Bytes where the group can send them from."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(transport_device(group))


def transport_device(group: dist.ProcessGroup) -> torch.device:
    """A device whose tensors the group can send; the CPU if that is one."""
    kinds = {device.type for device in group._device_types}
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds.pop(), torch.accelerator.current_device_index())
