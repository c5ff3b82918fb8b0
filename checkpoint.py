"""The run folder: what a run leaves on disk, and how it is taken up again.

Owns the lock, the records (JSONL), and the training states state-NNNN, each complete or not there at all: written to a
temporary name, flushed, renamed, with a manifest of sizes and checksums. Safetensors and JSON only. No RL in here.

A folder must be visible to all ranks: on several machines, on a file system they share. A full disk is a UserError on
every rank, and what was there before stays.
"""

import fcntl
import hashlib
import json
import os
import shutil
import time
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import fsdp_utils
from console import UserError

_locks = []  # open files whose locks end with the process


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


def write(path, text):
    """Replaces a file by `text`, whole or not at all; UserError if it cannot be written."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"{path}: {error.strerror}; what was there stays") from error


def append(path, text):
    """Adds whole lines to a file. OSError leaves it as it was: half a line would spoil the one after it."""
    with open(path, "a") as file:
        size = file.tell()
        try:
            file.write(text)
            file.flush()
        except OSError:
            os.truncate(path, size)
            raise


def open_run_folder(out, resume, name, note=print):
    """Collective. Creates a run folder, or finds the newest whole state of the one to resume -> (folder, state | None).

    out: the folder; "": a new one, runs/name-TIME. It is locked: no second run can write there. note() gets a line for
    every damaged state that is passed over.
    """
    default = f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, state = fsdp_utils.once(lambda: _open_run_folder(out, resume, default, note))
    return Path(folder), state and Path(state)


def _open_run_folder(out, resume, default, note):
    folder = Path(out or default)
    records = [path for path in (folder / "config.json", folder / "metrics.jsonl") if path.is_file()]
    if out and not resume and any(path.stat().st_size for path in records):
        raise UserError(f"{folder} holds another run: give --resume to continue it, or another --out")
    if resume and not folder.is_dir():
        raise UserError(f"{folder}: no checkpoint to resume from (state-NNNN/state.json)")
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
    return str(folder), str(newest_state(folder, note)) if resume else None


def begin_run(folder, config, step):
    """Collective. Saves the JSON-able dict `config` as config.json and cuts the records back to `step`."""

    def begin():
        write(folder / "config.json", json.dumps(config, indent=1))
        cut_back([folder / "metrics.jsonl", folder / "rollouts.jsonl"], step)

    fsdp_utils.once(begin)


def cut_back(files, step):
    """Removes from JSONL files the rows of later steps than `step`, which are about to be run again.

    A last line without its end is what a killed run leaves of a row: it goes too.
    """
    for path in (path for path in files if path.exists()):
        lines = path.read_text().splitlines(keepends=True)
        write(path, "".join(line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step))


def digest(*values):
    """A short fingerprint of JSON-able values."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def digest_files(paths):
    """A fingerprint of files: sizes and 64 pieces of each, so that gigabytes of weights take no time."""
    total = hashlib.sha256()
    for path in sorted(paths):
        size = path.stat().st_size
        total.update(f"{path.name} {size}".encode())
        with open(path, "rb") as file:
            for i in range(64):
                file.seek(size * i // 64)
                total.update(file.read(65536))
    return total.hexdigest()[:16]


# Training states


def states_of(folder):
    """The training states of a run folder, by step."""
    return sorted(folder.glob("state-*[0-9]"), key=lambda path: int(path.name[6:]))


def newest_state(folder, note=print):
    """The newest state that is whole; damaged ones are named and passed over. UserError if none is left."""
    for state in reversed(states_of(folder)):
        if fault := damage(state):
            note(f"warning: {state} is damaged and passed over: {fault}")
        else:
            return state
    raise UserError(f"{folder}: no checkpoint to resume from (state-NNNN/state.json)")


def damage(state):
    """What is wrong with a state, by its manifest of sizes and checksums; "" if it is whole."""
    try:
        for name, (size, checksum) in read_manifest(state)["files"].items():
            path = state / Path(name).name
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes, not {size}"
            if _checksum(path) != checksum:
                return f"{name} is not what was written"
    except OSError as error:
        return f"{Path(error.filename or state).name}: {error.strerror}"
    except UserError as error:
        return str(error)
    return ""


def read_manifest(state):
    """A state's state.json, checked; UserError if it is not one."""
    try:
        facts = json.loads((state / "state.json").read_bytes())
        good = all(type(facts[name]) is int for name in ("step", "world", "optimizer_steps"))
        if good and len(facts["files"]) == facts["world"] and all(len(entry) == 2 for entry in facts["files"].values()):
            return facts
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise UserError(f"{state / 'state.json'} is no manifest of a training state")


def _checksum(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save_state(folder, model, optimizer, facts, ranks, keep=0):
    """Collective. Writes weights, moments and the JSON-able dict `facts` (with "step") to `folder`, or nothing.

    Each rank writes the shards it holds; the folder appears under its name only when all have written. Then all but the
    newest `keep` states beside it go (0: none goes).
    """
    folder = Path(folder)
    temporary = folder.with_name(folder.name + ".tmp")
    tensors, steps = {}, 0
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {})
        steps = int(state.get("step", 0))
        for key, tensor in (("master", parameter.detach()), *((k, v) for k, v in state.items() if k != "step")):
            tensors[f"{name}.{key}"] = tensor.to_local().cpu().contiguous()

    def begin():
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

    def finish():
        manifest = {**facts, "world": ranks.world, "optimizer_steps": steps, "files": dict(files)}
        write(temporary / "state.json", json.dumps(manifest, indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
        for old in states_of(folder.parent)[:-keep] if keep else ():
            shutil.rmtree(old, ignore_errors=True)

    try:
        fsdp_utils.once(begin)
        files = fsdp_utils.everywhere(lambda: _write_shard(tensors, temporary / f"rank-{ranks.rank:05d}.safetensors"))
        fsdp_utils.once(finish)
    except UserError:
        fsdp_utils.once(lambda: shutil.rmtree(temporary, ignore_errors=True))
        raise


def _write_shard(tensors, path):
    need, free = sum(tensor.nbytes for tensor in tensors.values()), shutil.disk_usage(path.parent).free
    if need > free:
        raise UserError(f"{path}: needs {need / 1e9:.2f} GB, the disk has {free / 1e9:.2f} GB left")
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        raise UserError(f"{path}: {error}") from error
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return path.name, (path.stat().st_size, _checksum(path))


def state_tensors(folder, dtype):
    """A generator, without any process group: (name, full weight in `dtype`) of a training state, one at a time."""
    folder = Path(folder)
    if fault := damage(folder):
        raise UserError(f"{folder}: not a whole training state: {fault}")
    files = [safe_open(folder / name, "pt") for name in sorted(read_manifest(folder)["files"])]
    for key in sorted(key for key in files[0].keys() if key.endswith(".master")):
        yield key.removesuffix(".master"), torch.cat([file.get_tensor(key) for file in files]).to(dtype)


def load_state(folder, model, optimizer):
    """Collective. Restores what `save_state` wrote, on any number of ranks; returns its `facts`.

    UserError if the state is damaged or belongs to a model of another shape.
    """
    folder = Path(folder)
    facts = read_manifest(folder)
    try:
        files = [safe_open(folder / name, "pt") for name in sorted(facts["files"])]
        for name, parameter in model.named_parameters():
            _read_rows(files, f"{name}.master", parameter)
            if facts["optimizer_steps"]:
                moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
                for key, moment in moments.items():
                    _read_rows(files, f"{name}.{key}", moment)
                step = torch.tensor(float(facts["optimizer_steps"]), device=parameter.device)
                optimizer.state[parameter] = {"step": step, **moments}
    except (OSError, SafetensorError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{folder}: cannot be resumed from with this model ({reason})") from error
    return facts


@torch.no_grad()
def _read_rows(files, name, parameter):
    """Fills this rank's rows of `parameter` from shards that were cut for another number of ranks."""
    local, rows = fsdp_utils.local_rows(parameter)
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
