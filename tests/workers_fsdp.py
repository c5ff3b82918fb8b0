"""One process of tests/test_fsdp_utils.py: does everything there is to do on N processes and writes down what it saw.

    torchrun --nproc_per_node 3 tests/workers_fsdp.py FOLDER     (or plain python: a world of one)

FOLDER holds the models (tied, untied). Written: rank 0's tensors as world-N-*.safetensors, and all ranks' facts as
world-N.json. Nothing is asserted here: the test compares.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from workers_common import tiny_rollouts

import checkpoint
import fsdp_utils
import rloo
from model import Qwen3, Qwen3Config, load_weights

VOCAB, VALID, TEMPERATURE, EPSILON, LR = 37, 35, 0.8, 0.02, 1e-2
SHAPES = [(4, 9), (2, 1), (6, 3), (1, 30), (3, 2), (5, 5), (2, 7)]
ADVANTAGES = [1.0, -0.5, 0.25, -1.0, 2.0, 0.75, -0.3]
ONE = [(4, 1)]  # a step with one sequence, of one token: all ranks but one have nothing to do


class Collectives(TorchDispatchMode):
    """The names of all collective operations, in order, wherever they come from."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def build(folder, dtype=torch.float32):
    with torch.device("meta"):
        model = Qwen3(Qwen3Config.from_json(folder / "config.json"), activation_checkpointing=True)
    fsdp_utils.shard(model, dtype).to_empty(device="cpu")
    load_weights(model, folder, fsdp_utils.local_rows)
    return model


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01, fused=True)


def accumulate(model, ranks, shapes, budget):
    """Forward and backward of this rank's share -> number of its micro-batches."""
    rollouts = tiny_rollouts(shapes, VALID)
    lengths = [len(r.prompt) + len(r.completion) - 1 for r in rollouts]
    plan = rloo.schedule(lengths, ranks.world, budget)[ranks.rank]
    batches = [rloo.pack([rollouts[i] for i in m], [ADVANTAGES[i] for i in m]) for m in plan]
    rloo.backward(model, None, batches, len(SHAPES), TEMPERATURE, VALID, EPSILON)
    return len(plan)


def full(model, pick=lambda parameter: parameter.detach()):
    return {name: pick(parameter).full_tensor().clone() for name, parameter in model.named_parameters()}


def check_gradients(folder, ranks, tensors, facts):
    model = build(folder)
    facts["initial"] = all(p.dtype == torch.float32 for p in model.parameters())
    for name, shapes, budget in (("one", SHAPES, 10**6), ("many", SHAPES, 12), ("idle", ONE, 100)):
        with Collectives() as seen:
            facts[f"micro_batches/{name}"] = accumulate(model, ranks, shapes, budget)
            facts[f"norm/{name}"] = fsdp_utils.clip_grad_norm(model, 1e9)
        facts[f"collectives/{name}"] = seen.names
        tensors[f"gradient/{name}"] = full(model, lambda p: p.grad)
        if name != "idle":
            model.zero_grad()
    model.zero_grad()
    accumulate(model, ranks, SHAPES, 12)
    facts["norm/clipped"] = fsdp_utils.clip_grad_norm(model, 0.05)
    tensors["gradient/clipped"] = full(model, lambda p: p.grad)
    facts["norm/after"] = fsdp_utils.clip_grad_norm(model, 1e9)
    model.zero_grad()
    return model


def check_step_and_state(model, folder, ranks, tensors, facts):
    optimizer = make_optimizer(model)
    for _ in range(2):
        accumulate(model, ranks, SHAPES, 12)
        optimizer.step()
        optimizer.zero_grad()
    tensors["stepped"] = full(model)
    tensors["gathered"] = dict(fsdp_utils.full_tensors(model, torch.float32))
    facts["gathered_by"] = [t is not None for t in tensors["gathered"].values()]
    state = folder.parent / f"state-{folder.name}"
    if ranks.world == 2:
        tensors["moments"] = moments(model, optimizer)
        checkpoint.save_state(state, model, optimizer, {"step": 2, "text": "é"}, ranks)
    elif state.exists():
        fresh = build(folder)
        loaded = make_optimizer(fresh)
        facts["loaded"] = checkpoint.load_state(state, fresh, loaded)
        tensors["loaded"] = full(fresh)
        tensors["moments"] = moments(fresh, loaded)
        accumulate(fresh, ranks, SHAPES, 12)  # and it can go on
        loaded.step()
        tensors["continued"] = full(fresh)


def moments(model, optimizer):
    names = dict(model.named_parameters())
    return {f"{n}.{k}": optimizer.state[p][k].full_tensor().clone() for n, p in names.items() for k in ("exp_avg", "exp_avg_sq")}


def check_copies(folder, ranks, facts):
    """The sampler's weights against a gather of every tensor, and its forward against the trainer's: bits."""
    for label, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        model = build(folder, dtype)
        sampler = Qwen3(model.config).to(dtype).requires_grad_(False)
        addresses = [p.data_ptr() for p in sampler.parameters()]
        fsdp_utils.copy_weights(model, sampler)
        masters = full(model)
        facts[f"copy/{label}"] = all(torch.equal(p, masters[n].to(dtype)) for n, p in sampler.named_parameters())
        facts[f"copy_in_place/{label}"] = addresses == [p.data_ptr() for p in sampler.parameters()]
        batch = rloo.pack(tiny_rollouts(SHAPES[:2], VALID), [1.0, 1.0])
        with torch.no_grad():
            ours, theirs = [rloo.token_logprobs(m, batch, 1.0, VALID)[0] for m in (model, sampler)]
        facts[f"same_forward/{label}"] = torch.equal(ours, theirs)
        accumulate(model, ranks, SHAPES, 12)
        kinds = {t.dtype for p in model.parameters() for t in (p, p.grad)}
        facts[f"masters_and_gradients/{label}"] = sorted(map(str, kinds))


def check_reductions(ranks, facts):
    mine = torch.arange(ranks.rank * 2) + 100 * ranks.rank  # rank 0 has none
    facts["ragged"] = [row.tolist() for row in fsdp_utils.all_gather_ragged(mine)]
    facts["ragged_empty"] = [row.tolist() for row in fsdp_utils.all_gather_ragged(torch.zeros(0))]
    facts["ragged_dtype"] = [str(row.dtype) for row in fsdp_utils.all_gather_ragged(mine.double())]
    facts["text"] = fsdp_utils.gather_text(["", "αβγ 数学 🙂\n", "x" * 1000][ranks.rank])
    facts["text_broken"] = fsdp_utils.gather_text("a\ud800b")  # half a surrogate pair must not end a run
    facts["sum"] = fsdp_utils.all_sum([1.0 + ranks.rank, 2**53 + 0.0, 0.1])
    facts["max"] = fsdp_utils.all_max(float(-5 + ranks.rank))


def main(folder):
    ranks = fsdp_utils.init_distributed("cpu")
    facts = {"rank": ranks.rank, "world": ranks.world, "threads": torch.get_num_threads()}
    check_reductions(ranks, facts)
    for kind in ("tied", "untied"):
        tensors, facts[kind] = {}, {}
        model = check_gradients(folder / kind, ranks, tensors, facts[kind])
        check_step_and_state(model, folder / kind, ranks, tensors, facts[kind])
        check_copies(folder / kind, ranks, facts[kind])
        if ranks.rank == 0:
            flat = {f"{group}|{n}": t.contiguous() for group, named in tensors.items() for n, t in named.items()}
            save_file(flat, folder / f"world-{ranks.world}-{kind}.safetensors")
    gathered = fsdp_utils.gather_text(json.dumps(facts))
    if ranks.rank == 0:
        (folder / f"world-{ranks.world}.json").write_text("[" + ",".join(gathered) + "]")
    fsdp_utils.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
