"""Everything that knows there is more than one process.

Owns start and end of the process group, FSDP2 sharding, the weights handed to the sampler, reductions and the gradient
norm. Knows nothing of RL, text or files. One process is a world of size 1 on the same path;
CPU (gloo) and CUDA (NCCL) differ in the backend's name only.

Every function marked "collective" must be called by all ranks, the same number of times and in the same order.
"""

import json
import os
import resource
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from console import UserError

TIMEOUT = timedelta(hours=2)  # ranks wait for each other's longest rollout; a dead rank is torchrun's to notice


@dataclass(frozen=True)
class Ranks:
    """This process's place in the world."""

    rank: int
    world: int
    device: torch.device


def init_distributed(device="auto"):
    """Joins the process group that torchrun describes (or makes a world of one) and returns this process's Ranks.

    device: "cpu", "cuda" or "auto". On CPU each rank takes its share of the cores.
    """
    reproducible_matmul()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise UserError(f"process {local_rank} of this machine has no GPU: {torch.cuda.device_count()} are visible")
        torch.cuda.set_device(local_rank)
    else:
        set_threads(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    store = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, timeout=TIMEOUT, **store)
    return Ranks(rank, world, torch.device(device, local_rank) if device == "cuda" else torch.device("cpu"))


def reproducible_matmul():
    """Asks MKL for results that depend on neither thread count nor batch size (measured: at no cost on AVX-512).

    Read by MKL at its first product, so it must run early. Not on AMD, where MKL would fall back to a slow path.
    """
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and "GenuineIntel" in cpuinfo.read_text():
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def set_threads(processes):
    """Gives this process 1/processes of the cores, unless the user set OMP_NUM_THREADS.

    torchrun sets it to 1 when it starts several processes and the user did not: that 1 is overridden.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    by_user = asked.isdigit() and int(asked) > (1 if processes > 1 else 0)
    torch.set_num_threads(int(asked) if by_user else max(1, cores // processes))


def shutdown():
    """Leaves the process group. Call it on success only: after a failure, waiting for peers would hide the cause."""
    dist.destroy_process_group()


def shard(model, compute_dtype):
    """Shards `model` in place (FSDP2, ZeRO-3): fp32 masters, compute in `compute_dtype`, gradients reduced in fp32.

    One group a block; embedding, final norm and head share the root's group, which stays gathered from forward to
    backward: a tied embedding is then one parameter of one group, and the head may be called after the forward.
    Gradients are summed over ranks, never averaged: the loss already carries the global denominator.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for module in (*model.model.layers, model):
        fully_shard(module, mp_policy=policy)
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-scaled sum
    return model


def fsdp_modules(model):
    """The modules that are FSDP groups, blocks and root."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def local_rows(parameter):
    """A sharded parameter -> (this rank's tensor, the slice of rows it holds). FSDP2 cuts rows as torch.chunk does."""
    size = -(-parameter.shape[0] // dist.get_world_size())
    start = min(dist.get_rank() * size, parameter.shape[0])
    local = parameter.to_local()
    assert len(local) == min(size, parameter.shape[0] - start), (local.shape, parameter.shape)
    return local, slice(start, start + len(local))


@torch.no_grad()
def copy_weights(model, sampler):
    """Collective. Gathers the sharded weights in compute dtype and copies them into the plain `sampler`, in place.

    One gather a group: few, large collectives. The bits are those that the trainer's own forward will use.
    """
    target = dict(sampler.named_parameters())
    names = {id(module): name for name, module in model.named_modules()}
    for module in fsdp_modules(model):
        module.unshard()
        prefix = names[id(module)]
        for name, parameter in module.named_parameters(prefix=prefix):
            if not isinstance(parameter, DTensor):  # a DTensor belongs to a nested group that is still sharded
                target[name].copy_(parameter)
        module.reshard()


def full_tensors(model, dtype):
    """Collective, a generator: (name, full tensor on the host in `dtype`), one at a time; None on all but rank 0."""
    for name, parameter in model.named_parameters():
        full = parameter.detach().to(dtype).full_tensor()
        yield name, full.cpu() if dist.get_rank() == 0 else None


def all_sum(values):
    """Collective. Sums a list of floats over ranks (in float64)."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()


def all_max(value):
    """Collective. The largest of the ranks' numbers."""
    largest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def all_gather_ragged(values):
    """Collective. Each rank's 1-D host tensor, of any length -> the list of all ranks' tensors, in rank order."""
    sizes = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(values)]))
    longest = max(int(size) for size in sizes)
    padded = [values.new_zeros(longest) for _ in sizes]
    if longest:
        dist.all_gather(padded, torch.cat([values, values.new_zeros(longest - len(values))]))
    return [row[: int(size)] for row, size in zip(padded, sizes)]


def gather_text(text):
    """Collective. Each rank's string -> the list of all ranks' strings."""
    encoded = torch.frombuffer(bytearray(text.encode("utf-8", "backslashreplace")), dtype=torch.uint8) if text else None
    rows = all_gather_ragged(torch.zeros(0, dtype=torch.uint8) if encoded is None else encoded)
    return [bytes(row.tolist()).decode("utf-8") for row in rows]


def barrier():
    """Collective. Returns when every rank has come here."""
    dist.barrier()


def everywhere(function):
    """Collective. function() on every rank -> the list of their JSON-able results, on every rank.

    A UserError or OSError on one is raised as UserError on all: they go on together or not at all.
    """
    try:
        answer = ["", function()]  # [what went wrong, the result]
    except UserError as error:
        answer = [str(error), None]
    except OSError as error:
        answer = [f"{error.filename or 'file'}: {error.strerror or error}", None]
    answers = [json.loads(text) for text in gather_text(json.dumps(answer))]
    for message in (message for message, _ in answers if message):
        raise UserError(message)
    return [value for _, value in answers]


def once(function, per_node=False):
    """Collective. As everywhere, but called by rank 0 alone (or by one process of each node) -> its result, on all."""
    rank, local_rank = dist.get_rank(), int(os.environ.get("LOCAL_RANK", 0))
    mine = local_rank == 0 if per_node else rank == 0
    first = rank - local_rank if per_node else 0  # torchrun numbers the processes of a node one after the other
    return everywhere(lambda: function() if mine else None)[first]


def gradients(model):
    """This rank's shards of the gradients, as plain tensors. After a backward every parameter has one."""
    return [parameter.grad.to_local() for parameter in model.parameters()]


@torch.no_grad()
def clip_grad_norm(model, max_norm):
    """Collective. Scales the gradients to global L2 norm at most `max_norm`; returns the norm before (a float).

    One number is reduced, whatever the number of parameters. A non-finite norm leaves the gradients alone: refuse to
    step.
    """
    shards = gradients(model)
    norm = all_sum([torch.nn.utils.get_total_norm(shards).item() ** 2])[0] ** 0.5
    if max_norm < norm < float("inf"):
        for gradient in shards:
            gradient.mul_(max_norm / norm)
    return norm


def clock(device):
    """Seconds (time.perf_counter) after everything queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def peak_memory_gb(device):
    """The most this process ever held: GPU memory, or resident memory on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9
