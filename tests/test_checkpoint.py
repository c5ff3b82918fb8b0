"""checkpoint.py: locks, records and training states, with everything a disk, a kill or a careless hand can do to them.

Together: a state is whole or is not there; what was damaged is named and passed over, never loaded; a full disk costs the
new state and nothing else; records never hold half a line; and no bytes whatever make anything but a UserError.
Saving and loading on several processes is tested in test_fsdp_utils.py and test_train.py.
"""

import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from workers_common import tiny_config, tiny_model

import checkpoint
import fsdp_utils
from console import UserError


@pytest.fixture
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    yield fsdp_utils.init_distributed("cpu")
    fsdp_utils.shutdown()
    checkpoint.unlock()
    torch.set_num_threads(threads)


def sharded(seed=0, **shape):
    model = fsdp_utils.shard(tiny_model(tiny_config(**shape), seed), torch.float32)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def stepped(seed=0):
    model, optimizer = sharded(seed)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def same(model, other):
    return all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(model.parameters(), other.parameters()))


# Training states


def test_a_state_before_the_first_step_has_no_moments(alone, tmp_path):
    model, optimizer = sharded()
    checkpoint.save_state(tmp_path / "state-0000", model, optimizer, {"step": 0}, alone)
    fresh, other = sharded(seed=1)
    facts = checkpoint.load_state(tmp_path / "state-0000", fresh, other)
    assert facts["optimizer_steps"] == 0 and not other.state and same(model, fresh)


def test_a_state_of_another_model_is_refused(alone, tmp_path):
    checkpoint.save_state(tmp_path / "state-0001", *stepped(), {"step": 1}, alone)
    with pytest.raises(UserError, match="cannot be resumed from with this model"):
        checkpoint.load_state(tmp_path / "state-0001", *sharded(vocab=40))
    with pytest.raises(UserError, match="cannot be resumed from with this model"):
        checkpoint.load_state(tmp_path / "state-0001", *sharded(tied=False))


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), SafetensorError("I/O error: No space left on device")])
def test_a_full_disk_costs_the_new_state_alone(alone, monkeypatch, tmp_path, failure):
    """J6, J7. The state before it stays, nothing half made is left, and the next save works."""
    model, optimizer = stepped()
    checkpoint.save_state(tmp_path / "state-0001", model, optimizer, {"step": 1}, alone)

    def fails(tensors, path):
        path.write_bytes(b"half")
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", fails)
        for folder in ("state-0001", "state-0002"):  # over an old one, and a new one
            with pytest.raises(UserError, match="No space left"):
                checkpoint.save_state(tmp_path / folder, model, optimizer, {"step": 2}, alone)
    assert [path.name for path in tmp_path.iterdir()] == ["state-0001"] and not checkpoint.damage(tmp_path / "state-0001")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "disk_usage", lambda path: type("", (), {"free": 1000}))
        with pytest.raises(UserError, match="needs 0.00 GB, the disk has 0.00 GB left"):
            checkpoint.save_state(tmp_path / "state-0002", model, optimizer, {"step": 2}, alone)
    checkpoint.save_state(tmp_path / "state-0002", model, optimizer, {"step": 2}, alone)
    assert checkpoint.newest_state(tmp_path) == tmp_path / "state-0002"


def test_the_newest_states_are_kept_by_number(alone, tmp_path):
    model, optimizer = sharded()
    for step in (900, 1000, 10000):
        checkpoint.save_state(tmp_path / f"state-{step:04d}", model, optimizer, {"step": step}, alone, keep=2)
    (tmp_path / "state-30000.tmp").mkdir()
    assert [path.name for path in checkpoint.states_of(tmp_path)] == ["state-1000", "state-10000"]
    assert checkpoint.newest_state(tmp_path) == tmp_path / "state-10000"


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip(path):
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name, harm, words", [
    ("rank-00000.safetensors", cut, "bytes, not"), ("rank-00000.safetensors", flip, "not what was written"),
    ("rank-00000.safetensors", Path.unlink, "No such file"), ("state.json", Path.unlink, "No such file"),
    ("state.json", cut, "no manifest"), ("state.json", lambda path: path.write_text("{}"), "no manifest"),
    ("state.json", lambda path: path.write_text("[" * 100_000), "no manifest"),
    ("state.json", lambda path: (path.unlink(), path.mkdir()), "directory"),
])  # fmt: skip
def test_a_damaged_state_is_named_and_the_one_before_it_used(alone, tmp_path, name, harm, words):
    model, optimizer = stepped()
    for step in (1, 2):
        checkpoint.save_state(tmp_path / f"state-000{step}", model, optimizer, {"step": step}, alone)
    harm(tmp_path / "state-0002" / name)
    said = []
    assert checkpoint.newest_state(tmp_path, said.append) == tmp_path / "state-0001"
    assert len(said) == 1 and "state-0002 is damaged" in said[0] and words in said[0] and "\n" not in said[0]
    shutil.rmtree(tmp_path / "state-0001")
    with pytest.raises(UserError, match="no checkpoint to resume from"):
        checkpoint.newest_state(tmp_path, said.append)
    with pytest.raises(UserError, match="not a whole training state|no manifest"):
        list(checkpoint.state_tensors(tmp_path / "state-0002", torch.bfloat16))


def test_mutated_states_are_passed_over_whatever_the_bytes(alone, tmp_path):
    """Every single change of the manifest or the shard that matters is found, and none makes anything but a UserError."""
    model, optimizer = stepped()
    checkpoint.save_state(tmp_path / "state-0001", model, optimizer, {"step": 1}, alone)
    draw, outcomes = random.Random(3), {"whole": 0, "damaged": 0}
    files = {path: path.read_bytes() for path in (tmp_path / "state-0001").iterdir()}
    for _ in range(600):
        path = draw.choice(list(files))
        content = bytearray(files[path])
        for _ in range(draw.randrange(1, 4)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        path.write_bytes(content[: draw.choice((len(content), draw.randrange(len(content))))])
        fresh, other = sharded(seed=5)
        if checkpoint.damage(tmp_path / "state-0001"):
            outcomes["damaged"] += 1
        else:  # white space, or the step number, which has no checksum
            outcomes["whole"] += 1
            try:
                checkpoint.load_state(tmp_path / "state-0001", fresh, other)
                assert same(model, fresh)
            except UserError:
                pass
        path.write_bytes(files[path])
    assert outcomes["damaged"] > 500, outcomes


# The run folder


def test_run_folders(alone, tmp_path):
    folder, state = checkpoint.open_run_folder(tmp_path / "a/b", False, "")
    assert folder == tmp_path / "a/b" and state is None
    checkpoint.begin_run(folder, {"lr": 0.5}, 0)
    assert json.loads((folder / "config.json").read_text()) == {"lr": 0.5}
    (tmp_path / "file").write_text("")
    checkpoint.unlock()
    for path, resume, words in ((folder, False, "another run"), (folder, True, "no checkpoint"),
                                (tmp_path / "none", True, "no checkpoint"), (tmp_path / "file", False, "cannot write"),
                                (tmp_path / "file/below", False, "cannot write")):  # fmt: skip
        with pytest.raises(UserError, match=words):
            checkpoint.open_run_folder(path, resume, "")
        checkpoint.unlock()
    assert json.loads((folder / "config.json").read_text()) == {"lr": 0.5}  # a refused run changed nothing


def test_rows_of_later_steps_are_cut_and_half_a_line_too(tmp_path):
    """A killed run may leave half a line; the steps it wrote after its last checkpoint are about to run again."""
    path = tmp_path / "metrics.jsonl"
    rows = [json.dumps({"step": step}) + "\n" for step in (0, 1, 2, 3)]
    path.write_text("".join(rows))
    checkpoint.cut_back([path, tmp_path / "absent.jsonl"], 2)
    assert path.read_text() == "".join(rows[:3])
    path.write_text("".join(rows) + '{"step": 4, "rewa')
    checkpoint.cut_back([path], 3)
    assert path.read_text() == "".join(rows)


def test_what_cannot_be_written_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "x.jsonl"
    checkpoint.append(path, "one\n")
    checkpoint.append(path, "")
    real = open

    def failing(*args):
        file = real(*args)
        if "a" in args:
            class Full:
                def __enter__(self): return self
                def __exit__(self, *error): file.close()
                def tell(self): return file.tell()
                def write(self, text): file.write(text[:3])
                def flush(self): file.flush(); raise OSError(28, "No space left on device")
            return Full()
        return file  # fmt: skip

    monkeypatch.setattr(checkpoint, "open", failing, raising=False)
    with pytest.raises(OSError):
        checkpoint.append(path, "another line\n")
    assert path.read_text() == "one\n"


def test_a_full_disk_in_a_run_is_a_warning_each_time(alone, tmp_path):
    """Log.guard: metrics of a step may be lost, the run is not."""
    import train

    config = train.Config()
    log = train.Log(config, tmp_path / "gone", alone, 0)  # a folder that does not exist: nothing can be written
    said = []
    log.say = said.append
    log.row({"step": 1}, [{"step": 1}])
    assert len(said) == 2 and all("training goes on" in line for line in said)


@pytest.mark.skipif(os.name != "posix", reason="flock")
def test_a_folder_has_one_owner(tmp_path):
    checkpoint.lock(tmp_path)
    with pytest.raises(UserError, match="another process"):
        checkpoint.lock(tmp_path)
    checkpoint.unlock()
    checkpoint.lock(tmp_path)
    checkpoint.unlock()
