"""fsdp_utils.py on 1, 2 and 3 processes over gloo, against one plain process that knows nothing of sharding.

Together: whatever the number of processes and micro-batches, the gradient, its norm, the AdamW step and the saved state
are those of one process; every row of a vocabulary that divides by nothing moves; the sampler gets the trainer's own
bits; and all ranks make the same collective calls, also when one has no work. Three launches (about 8 s each) do all of
it in tests/workers_fsdp.py; the tests compare what they wrote.

Tolerances: 1e-5 of each tensor's largest element, for sums in another order in fp32 (rounding 6e-8, a few hundred
terms); AdamW steps 1e-4, because g / (|g| + 1e-8) amplifies the rounding of tiny gradients. Copies and saved states:
bits.
"""

import json
import os

import pytest
import torch
from safetensors.torch import load_file
from workers_common import (
    ROOT,
    distance,
    gradients,
    launch,
    naive_loss,
    tiny_config,
    tiny_model,
    tiny_rollouts,
    write_model,
)
from workers_fsdp import ADVANTAGES, EPSILON, LR, ONE, SHAPES, TEMPERATURE, VALID, VOCAB

import fsdp_utils

KINDS, WORLDS = ("tied", "untied"), (1, 2, 3)
# untied: q_norm and k_norm have 2 rows, so that of 3 ranks one holds none of them
CONFIGS = {"tied": tiny_config(True, VOCAB), "untied": tiny_config(False, VOCAB, head_dim=2)}


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """{world: [facts of each rank]} and the folder of tensors. World 2 runs first: it saves what 1 and 3 load."""
    folder = tmp_path_factory.mktemp("fsdp")
    for kind in KINDS:
        write_model(tiny_model(CONFIGS[kind]), folder / kind)
    facts = {}
    for world in (2, 1, 3):
        done = launch(world if world > 1 else 0, ROOT / "tests/workers_fsdp.py", folder)
        assert done.returncode == 0, done.stderr[-3000:]
        facts[world] = json.loads((folder / f"world-{world}.json").read_text())
        assert [f["rank"] for f in facts[world]] == list(range(world))
    return facts, folder


@pytest.fixture(scope="module")
def tensors(launched):
    """tensors[world, kind][group] = {name: tensor}, as rank 0 saw them."""
    found = {}
    for world in WORLDS:
        for kind in KINDS:
            groups = found[world, kind] = {}
            for key, tensor in load_file(launched[1] / f"world-{world}-{kind}.safetensors").items():
                group, _, name = key.partition("|")
                groups.setdefault(group, {})[name] = tensor
    return found


@pytest.fixture(scope="module")
def expected():
    """The same by one process: naive loss, plain parameters, plain AdamW."""
    result = {}
    for kind in KINDS:
        model = tiny_model(CONFIGS[kind])
        groups = result[kind] = {}

        def gradient(shapes, model=model):
            model.zero_grad()
            rollouts = tiny_rollouts(shapes, VALID)
            naive_loss(model, rollouts, ADVANTAGES, len(SHAPES), TEMPERATURE, VALID, EPSILON).backward()
            return gradients(model)

        groups["one"] = groups["many"] = gradient(SHAPES)
        groups["idle"] = {n: g + gradient(ONE)[n] * 0 for n, g in gradient(ONE).items()}
        groups["initial"] = {n: p.detach().clone() for n, p in model.named_parameters()}
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
        for label in ("half", "stepped", "continued"):
            gradient(SHAPES)
            optimizer.step()
            groups[label] = {n: p.detach().clone() for n, p in model.named_parameters()}
    return result


def norm(named):
    return float(torch.cat([g.flatten().double() for g in named.values()]).norm())


each = pytest.mark.parametrize("world", WORLDS)
both = pytest.mark.parametrize("kind", KINDS)


@each
@both
@pytest.mark.parametrize("name", ["one", "many", "idle"])
def test_gradient_equals_one_process(tensors, expected, world, kind, name):
    """k = 1 micro-batch, many, and one sequence of one token with the other ranks idle."""
    assert distance(tensors[world, kind][f"gradient/{name}"], expected[kind][name]) < 1e-5


@each
@both
def test_norm_and_clipping(launched, tensors, expected, world, kind):
    """G5: the norm is global and the same number on every rank, and clipping scales to 0.05."""
    for facts in launched[0][world]:
        for name in ("one", "many", "idle"):
            assert abs(facts[kind][f"norm/{name}"] / norm(expected[kind][name]) - 1) < 1e-5
        assert abs(facts[kind]["norm/clipped"] / norm(expected[kind]["one"]) - 1) < 1e-5  # the norm before
        assert abs(facts[kind]["norm/after"] / 0.05 - 1) < 1e-5
    scale = 0.05 / norm(expected[kind]["one"])
    assert scale < 0.5  # or there was nothing to clip
    scaled = {n: g * scale for n, g in expected[kind]["one"].items()}
    assert distance(tensors[world, kind]["gradient/clipped"], scaled) < 1e-5


@each
@both
def test_two_adamw_steps_equal_one_process(tensors, expected, world, kind):
    found = tensors[world, kind]
    assert distance(found["stepped"], expected[kind]["stepped"]) < 1e-4
    assert all(torch.equal(found["gathered"][n], t) for n, t in found["stepped"].items())


@each
@both
def test_every_row_moves(tensors, expected, world, kind):
    """F3: with a vocabulary that the world size does not divide, a whole shard of a tied embedding once stayed put.

    Rows beyond the tokenizer or unused as input have no gradient in an untied embedding, and move by weight decay.
    """
    names = ["model.embed_tokens.weight"] + ["lm_head.weight"] * (kind == "untied")
    for name in names:
        moved = tensors[world, kind]["stepped"][name] - expected[kind]["initial"][name]
        assert moved.shape[0] == VOCAB and (moved.abs().amax(1) > 0).all()
    row_gradient = tensors[world, kind]["gradient/one"][names[-1]].abs().amax(1)
    assert (row_gradient[:VALID] > 0).all()


@each
@both
def test_the_sampler_gets_the_trainers_bits(launched, world, kind):
    """A10, K2: in place, equal to the masters rounded once, and the two forwards agree to the last bit."""
    for facts in launched[0][world]:
        for dtype in ("fp32", "bf16"):
            assert facts[kind][f"copy/{dtype}"] and facts[kind][f"copy_in_place/{dtype}"]
            assert facts[kind][f"same_forward/{dtype}"]
            assert facts[kind][f"masters_and_gradients/{dtype}"] == ["torch.float32"]  # I1, I2


@each
@both
def test_only_rank_0_keeps_full_tensors(launched, world, kind):
    """F7: the others take part in the gather and keep nothing."""
    for facts in launched[0][world]:
        assert facts[kind]["gathered_by"] and set(facts[kind]["gathered_by"]) == {facts["rank"] == 0}


@each
@both
def test_ranks_make_the_same_collective_calls(launched, world, kind):
    """G1, G3: in number and order, whatever the lengths; with one sequence of one token too."""
    for name in ("one", "many", "idle"):
        calls = [facts[kind][f"collectives/{name}"] for facts in launched[0][world]]
        assert all(call == calls[0] for call in calls)
        assert any("reduce" in call for call in calls[0])
        assert world == 1 or any("gather" in call for call in calls[0])  # a world of one has nothing to gather
        counts = {facts[kind][f"micro_batches/{name}"] for facts in launched[0][world]}
        assert len(counts) == 1
    # more micro-batches than one, or "many" shows nothing
    assert launched[0][world][0][kind]["micro_batches/many"] > launched[0][world][0][kind]["micro_batches/one"] == 1


@pytest.mark.parametrize("world", [1, 3])
@both
def test_state_saved_by_two_is_loaded_by_any_number(launched, tensors, expected, world, kind):
    """J8: weights and both moments bit for bit, and the next step is the one that an unbroken run would take."""
    saved, loaded = tensors[2, kind], tensors[world, kind]
    assert all(torch.equal(loaded["loaded"][n], t) for n, t in saved["stepped"].items())
    assert loaded["moments"].keys() == saved["moments"].keys() and len(saved["moments"]) == 2 * len(saved["stepped"])
    assert all(torch.equal(loaded["moments"][n], t) and t.abs().max() > 0 for n, t in saved["moments"].items())
    for facts in launched[0][world]:
        read = facts[kind]["loaded"]
        assert [*read["files"]] == ["rank-00000.safetensors", "rank-00001.safetensors"]
        assert (read["step"], read["text"], read["world"], read["optimizer_steps"]) == (2, "é", 2, 2)
    assert distance(loaded["continued"], expected[kind]["continued"]) < 1e-4
    assert distance(loaded["continued"], saved["stepped"]) > 1e-3


@each
def test_reductions(launched, world):
    for facts in launched[0][world]:
        ragged = [[], [100, 101], [200, 201, 202, 203]][:world]
        assert facts["ragged"] == ragged and facts["ragged_empty"] == [[]] * world
        assert facts["ragged_dtype"] == ["torch.float64"] * world
        assert facts["text"] == ["", "αβγ 数学 🙂\n", "x" * 1000][:world]
        assert facts["text_broken"] == ["a\\ud800b"] * world
        assert facts["sum"] == pytest.approx([[1, 3, 6][world - 1], world * 2**53, 0.1 * world], rel=1e-15)
        assert facts["max"] == -5 + world - 1


@each
def test_each_rank_takes_its_share_of_the_cores(launched, world):
    """torchrun sets OMP_NUM_THREADS=1, which leaves most of a laptop idle."""
    cores = len(os.sched_getaffinity(0))
    assert [facts["threads"] for facts in launched[0][world]] == [max(1, cores // world)] * world


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("asked, processes, expected", [("3", 1, 3), ("5", 4, 5), ("1", 1, 1), (None, 1, "all"),
                                                        ("1", 10**6, 1), ("many", 10**6, 1)])  # fmt: skip
def test_a_users_own_number_of_threads_is_kept(monkeypatch, threads, asked, processes, expected):
    if asked:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    else:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    fsdp_utils.set_threads(processes)
    assert torch.get_num_threads() == (len(os.sched_getaffinity(0)) if expected == "all" else expected)


# A world of one, in this process


@pytest.fixture
def alone(monkeypatch, threads):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield fsdp_utils.init_distributed("cpu")
    fsdp_utils.shutdown()


def sharded(kind="tied"):
    model = fsdp_utils.shard(tiny_model(CONFIGS[kind]), torch.float32)
    return model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_norm_that_is_no_number_leaves_the_gradients_alone(alone, bad):
    """I4, B11: train.py refuses the step; scaling by 0.3 / inf or nan would hide what happened."""
    model, _ = sharded()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    next(model.parameters()).grad.to_local()[0, 0] = bad
    assert not torch.isfinite(torch.tensor(fsdp_utils.clip_grad_norm(model, 0.3)))
    assert all((p.grad.to_local() == 1).sum() >= p.numel() - 1 for p in model.parameters())
