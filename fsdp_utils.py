"""Everything that knows there is more than one process.

Owns start and end of the process group, FSDP2 sharding, the weights handed to the sampler, reductions, the gradient
norm, and the training state on disk. Knows nothing of RL or text. One process is a world of size 1 on the same path;
CPU (gloo) and CUDA (NCCL) differ in the backend's name only.

Every function marked "collective" must be called by all ranks, the same number of times and in the same order.
"""

import fcntl
import json
import os
import resource
import shutil
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from console import UserError

TIMEOUT = timedelta(hours=2)  # ranks wait for each other's longest rollout; a dead rank is torchrun's to notice

_locks = []  # open files whose locks end with the process


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
    unlock()
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


def once(function, per_node=False):
    """Collective. function(), called by rank 0 alone (or by one process of each node) -> its JSON-able result, on all.

    The others wait. A UserError there is raised on every rank.
    """
    local_rank, answer = int(os.environ.get("LOCAL_RANK", 0)), ["", None]
    if local_rank == 0 if per_node else dist.get_rank() == 0:
        try:
            answer = ["", function()]
        except UserError as error:
            answer = [str(error), None]
    answers = [json.loads(text) for text in gather_text(json.dumps(answer))]
    for message in (message for message, _ in answers if message):
        raise UserError(message)
    return answers[dist.get_rank() - local_rank if per_node else 0][1]


def lock(folder):
    """Holds `folder` until this process ends; UserError if another process does. Call it on one rank."""
    file = open(Path(folder) / ".lock", "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{folder}: another process is writing there; wait for it, or give another --out") from None
    _locks.append(file)


def unlock():
    """Gives back every folder that this process holds."""
    while _locks:
        _locks.pop().close()


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


def open_run_folder(out, resume, name):
    """Collective. Creates a run folder, or finds the newest state of the one to resume -> (folder, state or None).

    out: the folder; "": a new one, runs/name-TIME. The folder must be visible to all ranks: on several machines, on a
    file system they share. It is locked: no second run can write there.
    """
    folder, state = once(lambda: _open_run_folder(out, resume, f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"))
    return Path(folder), state and Path(state)


def _open_run_folder(out, resume, default):
    folder = Path(out or default)
    states = {int(path.parent.name[6:]): path.parent for path in folder.glob("state-[0-9]*[0-9]/state.json")}
    if resume and not states:
        raise UserError(f"{folder}: no checkpoint to resume from (state-NNNN/state.json)")
    used = [path for path in (folder / "config.json", folder / "metrics.jsonl") if path.is_file() and path.stat().st_size]
    if out and not resume and used:
        raise UserError(f"{folder} holds another run: give --resume to continue it, or another --out")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for number in range(2, 1000) if not out else ():  # another run may have been started in the same second
            try:
                folder.mkdir()
                break
            except FileExistsError:
                folder = Path(f"{default}-{number}")
        folder.mkdir(exist_ok=True)
        lock(folder)
        (folder / "metrics.jsonl").touch()  # it can be written to
    except OSError as failure:
        raise UserError(f"{folder}: cannot write the run folder ({failure.strerror})") from failure
    return str(folder), str(states[max(states)]) if resume else None


def begin_run(folder, config, step):
    """Rank 0 saves the JSON-able dict `config` as config.json and cuts the records back to `step`. Not collective."""
    if dist.get_rank() == 0:
        temporary = folder / "config.json.tmp"
        temporary.write_text(json.dumps(config, indent=1))
        temporary.replace(folder / "config.json")
        cut_back([folder / "metrics.jsonl", folder / "rollouts.jsonl"], step)


def cut_back(files, step):
    """Removes from JSONL files the rows of later steps than `step`, which are about to be run again.

    A last line without its end is what a killed run leaves of a row: it goes too.
    """
    for path in (path for path in files if path.exists()):
        lines = path.read_text().splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text("".join(kept))
        temporary.replace(path)


def save_state(folder, model, optimizer, facts):
    """Collective. Writes weights, moments and the JSON-able dict `facts` to `folder`, complete or not at all.

    Each rank writes the shards it holds; the folder appears under its name only when all have written.
    """
    folder, rank = Path(folder), dist.get_rank()
    temporary = folder.with_name(folder.name + ".tmp")
    if rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    tensors, steps = {}, 0
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {})
        steps = int(state.get("step", 0))
        for key, tensor in (("master", parameter.detach()), *((k, v) for k, v in state.items() if k != "step")):
            tensors[f"{name}.{key}"] = tensor.to_local().cpu().contiguous()
    save_file(tensors, temporary / f"rank-{rank:05d}.safetensors")
    dist.barrier()
    if rank == 0:
        facts = {**facts, "world": dist.get_world_size(), "optimizer_steps": steps}
        (temporary / "state.json").write_text(json.dumps(facts, indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    dist.barrier()


def prune_states(folder, keep):
    """Rank 0 removes all but the newest `keep` training states of a run folder (0: none). Not collective."""
    states = sorted(folder.glob("state-*[0-9]"), key=lambda path: int(path.name[6:]))
    if keep and dist.get_rank() == 0:
        for path in states[:-keep]:
            shutil.rmtree(path, ignore_errors=True)


def state_tensors(folder, dtype):
    """A generator, without any process group: (name, full weight in `dtype`) of a training state, one at a time."""
    folder = Path(folder)
    try:
        world = json.loads((folder / "state.json").read_text())["world"]
        files = [safe_open(folder / f"rank-{rank:05d}.safetensors", "pt") for rank in range(world)]
        for key in sorted(key for key in files[0].keys() if key.endswith(".master")):
            yield key.removesuffix(".master"), torch.cat([file.get_tensor(key) for file in files]).to(dtype)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}: not a whole training state ({error})") from error


def load_state(folder, model, optimizer):
    """Collective. Restores what `save_state` wrote, on any number of ranks; returns its `facts`.

    UserError if the state is damaged or belongs to a model of another shape.
    """
    try:
        return _load_state(Path(folder), model, optimizer)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{folder}: cannot be resumed from with this model ({reason})") from error


def _load_state(folder, model, optimizer):
    facts = json.loads((folder / "state.json").read_text())
    files = [safe_open(folder / f"rank-{rank:05d}.safetensors", "pt") for rank in range(facts["world"])]
    for name, parameter in model.named_parameters():
        _read_rows(files, f"{name}.master", parameter)
        if facts["optimizer_steps"]:
            moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            for key, moment in moments.items():
                _read_rows(files, f"{name}.{key}", moment)
            step = torch.tensor(float(facts["optimizer_steps"]), device=parameter.device)
            optimizer.state[parameter] = {"step": step, **moments}
    return facts


@torch.no_grad()
def _read_rows(files, name, parameter):
    """Fills this rank's rows of `parameter` from shards that were cut for another number of ranks."""
    local, rows = local_rows(parameter)
    offset = 0
    for file in files:
        saved = file.get_slice(name)
        length = saved.get_shape()[0]
        start, stop = max(rows.start, offset), min(rows.stop, offset + length)
        if start < stop:
            local[start - rows.start : stop - rows.start].copy_(saved[start - offset : stop - offset])
        offset += length
    if offset != parameter.shape[0]:
        raise ValueError(f"{name} has {offset} rows, the model's has {parameter.shape[0]}")


def peak_memory_gb(device):
    """The most this process ever held: GPU memory, or resident memory on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9
