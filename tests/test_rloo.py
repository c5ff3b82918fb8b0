"""rloo.py against hand computation, closed forms and a naive reference.

Together: the advantages are the leave-one-out ones and their expected gradient is the gradient of the expected reward
(enumerated, not sampled); packing, chunking and any split into ranks and micro-batches change nothing; no tensor of
all tokens x vocabulary ever exists; and what is reported about the trainer's disagreement with the sampler is right.

Tolerances: float64 against closed form 1e-12; fp32 against the float64 or naive fp32 reference 1e-5 of the largest
element (fp32 rounding is 6e-8, summed over some hundred terms). Exact where the code promises zeros.
"""

import copy
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from workers_common import (
    distance,
    gradients,
    naive_logprobs,
    naive_loss,
    tiny_config,
    tiny_model,
    tiny_rollouts,
)

import rloo
from rollout import Rollout

EXACT = dict(rtol=0, atol=1e-12)
FP32 = dict(rtol=1e-5, atol=1e-5)


# Advantages


def test_advantages_by_hand():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [3.0, 1.0, 2.0, 6.0]])
    third = 1 / 3
    expected = [[1, -third, -third, -third], [2 * third, 2 * third, -2 * third, -2 * third],
                [0, 1 - 11 / 3, 2 - 10 / 3, 6 - 2]]  # fmt: skip
    found = rloo.rloo_advantages(rewards)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), **EXACT)
    assert found.dtype == torch.float64


@given(st.lists(st.lists(st.floats(-10, 10, width=32), min_size=5, max_size=5), min_size=1, max_size=4))
def test_advantages_of_a_group_sum_to_zero(rewards):
    """B6: the check that finds a baseline taken from the wrong rollouts. 1e-12: float64 sums of 5 numbers up to 10."""
    assert rloo.rloo_advantages(torch.tensor(rewards)).sum(1).abs().max() < 1e-12


@pytest.mark.parametrize("divide", [False, True])
@pytest.mark.parametrize("reward", [0.1, 0.0, 1.0, 1 / 3, 1e9 + 0.1, -0.7])
def test_equal_rewards_give_exact_zeros(reward, divide):
    """B7, B11. Sixteen times 0.1 is not 1.6 in binary: without care the group would carry a signal of 1e-17."""
    for dtype, size in itertools.product((torch.float32, torch.float64), (2, 3, 7, 16)):
        advantages = rloo.rloo_advantages(torch.full((2, size), reward, dtype=dtype), divide)
        assert (advantages == 0).all() and not advantages.isnan().any()


def test_division_by_std():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [3.0, 1.0, 2.0, 6.0]])
    std = torch.tensor([[0.5], [math.sqrt((0 + 4 + 1 + 9) / 3)]], dtype=torch.float64)  # by hand, n - 1 below
    expected = rloo.rloo_advantages(rewards) / (std + 1e-4)
    torch.testing.assert_close(rloo.rloo_advantages(rewards, divide_by_std=True), expected, **EXACT)


def test_a_group_of_one_is_refused():
    with pytest.raises(AssertionError, match="at least 2"):
        rloo.rloo_advantages(torch.ones(4, 1))


def test_discount_shrinks_with_length():
    found = rloo.discounted(torch.tensor([[1.0, 1.0, 0.0, 2.0]]), torch.tensor([[1, 10, 5, 0]]), 0.9)
    torch.testing.assert_close(found, torch.tensor([[0.9, 0.9**10, 0.0, 2.0]], dtype=torch.float64), **EXACT)
    rewards = torch.tensor([[0.1, 0.7]])
    assert torch.equal(rloo.discounted(rewards, torch.tensor([[8000, 3]]), 1.0), rewards.double())  # the default


def test_select():
    # signal with a zero inside, all-flat, signal
    advantages = torch.tensor([[0.75, 0.0, -0.75], [0.0, 0.0, 0.0], [1.0, -0.5, -0.5]], dtype=torch.float64)
    assert rloo.select(advantages) == ([0, 2, 6, 7, 8], 9)
    assert rloo.select(advantages, kl_coef=0.1) == (list(range(9)), 9)
    assert rloo.select(advantages, filter_groups=True) == ([0, 2, 6, 7, 8], 6)
    assert rloo.select(advantages, kl_coef=0.1, filter_groups=True) == ([0, 1, 2, 6, 7, 8], 6)


@pytest.mark.parametrize("kl_coef, filter_groups, expected", [
    (0.0, False, ([], 6)), (0.1, False, (list(range(6)), 6)), (0.0, True, ([], 0)), (0.1, True, ([], 0)),
])  # fmt: skip
def test_select_of_a_batch_without_signal(kl_coef, filter_groups, expected):
    assert rloo.select(torch.zeros(2, 3, dtype=torch.float64), kl_coef, filter_groups) == expected


# Schedule and packing

LENGTHS = st.lists(st.integers(1, 60), max_size=40)


@settings(max_examples=300)
@given(LENGTHS, st.integers(1, 5), st.integers(1, 100))
def test_schedule(lengths, ranks, budget):
    plan = rloo.schedule(lengths, ranks, budget)
    assert sorted(i for rank in plan for micro_batch in rank for i in micro_batch) == list(range(len(lengths)))
    assert len(plan) == ranks and len({len(rank) for rank in plan}) == 1 and len(plan[0]) >= 1  # G1
    sums = [[sum(lengths[i] for i in micro_batch) for micro_batch in rank] for rank in plan]
    assert all(total <= budget or len(plan[r][m]) == 1 for r, row in enumerate(sums) for m, total in enumerate(row))
    loads = [sum(row) for row in sums]
    assert max(loads) - min(loads) <= max(lengths, default=0)  # a property of giving to the least loaded
    assert plan == rloo.schedule(list(lengths), ranks, budget)  # a pure function: every rank computes the same
    # first fit leaves at most one micro-batch of a rank half empty or more
    assert all(sum(0 < 2 * total <= budget for total in row) <= 1 for row in sums)


def test_schedule_without_work_and_with_one_long_sequence():
    assert rloo.schedule([], 3, 10) == [[[]], [[]], [[]]]
    plan = rloo.schedule([5, 1000, 5], 2, 10)  # over the budget: a micro-batch of its own, and the other rank keeps step
    assert plan == [[[1]], [[0, 2]]]
    assert rloo.schedule([7], 2, 10) == [[[0]], [[]]]  # G2, G4: fewer sequences than ranks
    assert rloo.schedule([6, 6, 6], 1, 10) == [[[0], [1], [2]]]


def test_pack_by_hand():
    stop = 9
    rollouts = [Rollout([1, 2, 3], [4, stop], [-0.5, -0.25], "stop"), Rollout([5], [6], [-1.0]),
                Rollout([7, 8], [stop], [-2.0], "stop")]  # fmt: skip
    before = copy.deepcopy(rollouts)
    advantages = [2.0, -1.0, 0.0]
    batch = rloo.pack(rollouts, advantages)
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5, 7, 8]  # the last token of a sequence is nobody's input
    assert batch.targets.tolist() == [2, 3, 4, stop, 6, 8, stop]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 0, 1]  # C10: each sequence starts at 0
    assert batch.loss_mask.tolist() == [False, False, True, True, True, False, True]  # D1: the stop token is trained
    assert batch.advantages.tolist() == [0, 0, 2, 2, -1, 0, 0]
    assert batch.rollout_logprobs.tolist() == [0, 0, -0.5, -0.25, -1, 0, -2]
    assert batch.cu_seqlens == [0, 4, 5, 7] and all(type(c) is int for c in batch.cu_seqlens)
    assert batch.tokens.dtype == batch.targets.dtype == batch.positions.dtype == torch.long
    assert batch.advantages.dtype == batch.rollout_logprobs.dtype == torch.float32
    assert rollouts == before and advantages == [2.0, -1.0, 0.0]


def test_a_missing_logprob_is_refused():
    """A7: without the sampler's log-prob there is no importance weight, and nothing may pretend otherwise."""
    with pytest.raises(AssertionError, match="log-prob"):
        rloo.pack([Rollout([1], [2, 3], [-1.0])], [1.0])


def test_the_placeholder_adds_nothing():
    """G2: a rank without work runs it to stay in step."""
    model = tiny_model(tiny_config())
    batch = rloo.pack([], [])
    assert len(batch.tokens) == 1 and not batch.loss_mask.any()
    value, entropy, log_ratios = rloo.backward(model, None, [batch], 4, 1.0, 37, 0.02)
    assert value == 0 and entropy == 0 and len(log_ratios) == 0
    assert all(p.grad is not None and (p.grad == 0).all() for p in model.parameters())  # a gradient each: G1


# Log-probs


def head_inputs(rows=23, width=12, vocab=31, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, vocab - 4, (rows,), generator=generator), torch.randn(rows, generator=generator)


def naive_head(hidden, weight, targets, temperature, valid_vocab):
    logprobs = ((hidden.double() @ weight.double().T)[:, :valid_vocab] / temperature).log_softmax(-1)
    return logprobs[torch.arange(len(targets)), targets], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
@pytest.mark.parametrize("valid_vocab", [31, 27])
@pytest.mark.parametrize("chunk", [1, 4, 23, 1000])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)])  # bf16 keeps 8 bits
def test_head_equals_plain_log_softmax(temperature, valid_vocab, chunk, dtype, tolerance):
    """A1, A3, E2: value, entropy and both gradients, with 4 ids beyond the tokenizer and any chunk size."""
    hidden, weight, targets, upstream = head_inputs(dtype=dtype)
    expected, expected_entropy = naive_head(hidden, weight, targets, temperature, valid_vocab)
    (expected * upstream).sum().backward()
    reference = {"hidden": hidden.grad.clone(), "weight": weight.grad.clone()}
    hidden.grad = weight.grad = None
    logprobs, entropy = rloo._HeadLogprobs.apply(hidden, weight, targets, temperature, valid_vocab, chunk)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=2e-5)  # fp32 logits also from bf16 inputs
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=2e-5)
    (logprobs * upstream).sum().backward()
    assert distance({"hidden": hidden.grad, "weight": weight.grad}, reference) < tolerance
    assert (weight.grad[valid_vocab:] == 0).all()


def test_the_gradient_matches_finite_differences():
    """Not through any other backward: (f(x+h) - f(x-h)) / 2h in float64 of the naive forward, along random directions."""
    hidden, weight, targets, upstream = head_inputs(seed=3)
    logprobs, _ = rloo._HeadLogprobs.apply(hidden, weight, targets, 0.8, 27, 5)
    (logprobs * upstream).sum().backward()
    for seed in range(4):
        dh, dw = (t.detach().double() for t in head_inputs(seed=10 + seed)[:2])
        step = 1e-5

        def value(sign):
            moved = naive_head(hidden.detach().double() + sign * step * dh, weight.detach().double() + sign * step * dw,
                               targets, 0.8, 27)[0]  # fmt: skip
            return float((moved * upstream).sum())

        slope = (value(1) - value(-1)) / (2 * step)
        found = float((hidden.grad.double() * dh).sum() + (weight.grad.double() * dw).sum())
        assert abs(found - slope) < 1e-4 * max(1.0, abs(slope))  # fp32 gradient, hundreds of terms of size 1


def test_entropy_has_no_gradient():
    hidden, weight, targets, _ = head_inputs()
    logprobs, entropy = rloo._HeadLogprobs.apply(hidden, weight, targets, 1.0, 31, 4)
    assert logprobs.requires_grad and not entropy.requires_grad


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_token_logprobs_equal_one_sequence_at_a_time(temperature):
    config = tiny_config(vocab=41)
    model = tiny_model(config)
    rollouts = tiny_rollouts([(3, 5), (1, 1), (9, 1), (2, 17)], vocab=37)
    batch = rloo.pack(rollouts, [1.0] * 4)
    logprobs, entropy = rloo.token_logprobs(model, batch, temperature, valid_vocab=37, chunk_elements=37 * 3)
    naive = torch.cat([naive_logprobs(model, rollout, temperature, 37) for rollout in rollouts])
    torch.testing.assert_close(logprobs[batch.loss_mask], naive, **FP32)
    assert (logprobs[~batch.loss_mask] == 0).all() and (entropy[~batch.loss_mask] == 0).all()
    assert (entropy[batch.loss_mask] > 0).all() and (entropy <= math.log(37) + 1e-5).all()
    assert logprobs.shape == entropy.shape == batch.tokens.shape and not entropy.requires_grad


class Largest(TorchDispatchMode):
    """Records the largest tensor that any operation returns, forward and backward."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


def test_the_logits_of_all_tokens_never_exist():
    """H1, H2, at N = 480 trained tokens and V = 2000: one chunk is 16,000 elements, the head 40,000, all logits 960,000.

    The spy is first shown to see them in the naive computation: it could fail.
    """
    vocab, chunk = 2000, 8
    model = tiny_model(tiny_config(vocab=vocab))
    rollouts = tiny_rollouts([(4, 120)] * 4, vocab)
    batch = rloo.pack(rollouts, [1.0] * 4)
    with Largest() as naive:
        hidden = model(batch.tokens, batch.positions, rloo.PackedAttention(batch.cu_seqlens))
        naive_head(hidden, model.head_weight, batch.targets, 1.0, vocab)[0].sum().backward()
    with Largest() as spy:
        logprobs, _ = rloo.token_logprobs(model, batch, 1.0, vocab, chunk_elements=chunk * vocab)
        logprobs.sum().backward()
    assert naive.elements >= 480 * vocab
    assert spy.elements <= vocab * model.config.hidden_size  # the head's own gradient; chunks are smaller


def test_default_chunks_are_small_at_full_vocabulary():
    """64 MiB a chunk in fp32, not 151,936 x 4 bytes x 32,768 tokens = 20 GB."""
    model = tiny_model(tiny_config(vocab=151936, hidden_size=4, head_dim=2))
    batch = rloo.pack(tiny_rollouts([(2, 150)], 151669), [1.0])
    with Largest() as spy, torch.no_grad():
        rloo.token_logprobs(model, batch, 1.0, 151669)
    assert 2**23 < spy.elements <= 2**24  # one large product, and 150 rows do not fit in it


# Loss


def test_loss_by_hand():
    """Three tokens with ratios 1, 0.5 and 2 at epsilon 0.02: weights 1, 0.5 and 1.02, constants to the gradient."""
    logprobs = torch.tensor([0.5, 0.25, 0.2], dtype=torch.float64).log().requires_grad_()
    recorded = torch.tensor([0.5, 0.5, 0.1], dtype=torch.float64).log()
    advantages = torch.tensor([1.0, 1.0, -0.5], dtype=torch.float64)
    value = rloo.loss(logprobs, recorded, advantages, torch.ones(3, dtype=torch.bool), 8, 0.02)
    by_hand = -(1 * 1 * math.log(0.5) + 1 * 0.5 * math.log(0.25) - 0.5 * 1.02 * math.log(0.2)) / 8
    assert abs(value.item() - by_hand) < 1e-12 and value.shape == ()
    value.backward()  # were the ratio differentiated, a token would carry 1 + log p more
    expected = torch.tensor([-1.0, -0.5, 0.5 * 1.02], dtype=torch.float64) / 8
    torch.testing.assert_close(logprobs.grad, expected, **EXACT)


def test_kl_term_by_hand():
    """k3: exp(d) - d - 1 with d = ref - logprobs, gradient 1 - exp(d): 0 where the two agree. B8: also at A = 0."""
    logprobs = torch.tensor([0.5, 0.25, 0.2], dtype=torch.float64).log().requires_grad_()
    reference = torch.tensor([0.5, 0.5, 0.1], dtype=torch.float64).log()
    zero, mask = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.bool)
    value = rloo.loss(logprobs, logprobs.detach(), zero, mask, 4, 0.02, kl_coef=0.3, ref_logprobs=reference)
    by_hand = 0.3 * ((2 - math.log(2) - 1) + (0.5 + math.log(2) - 1)) / 4
    assert abs(value.item() - by_hand) < 1e-12
    value.backward()
    torch.testing.assert_close(logprobs.grad, 0.3 * torch.tensor([0.0, -1.0, 0.5], dtype=torch.float64) / 4, **EXACT)


def test_masked_positions_have_exactly_zero_gradient():
    logprobs = torch.randn(6, requires_grad=True)
    mask = torch.tensor([True, False, True, False, False, True])
    value = rloo.loss(logprobs, torch.randn(6), torch.randn(6), mask, 3, 0.02, 0.5, torch.randn(6))
    value.backward()
    assert (logprobs.grad[~mask] == 0).all() and (logprobs.grad[mask] != 0).all()
    nothing = rloo.loss(logprobs, torch.zeros(6), torch.ones(6), torch.zeros(6, dtype=torch.bool), 3, 0.02)
    assert nothing.item() == 0  # B9


@given(st.sets(st.integers(1, 11)), st.integers(0, 10))
def test_any_split_sums_to_the_same_loss(cuts, seed):
    """B1, B2, B3: the denominator belongs to the step. float64: 1e-12."""
    torch.manual_seed(seed)
    columns = [torch.randn(12, dtype=torch.float64) for _ in range(3)] + [torch.rand(12) > 0.3]
    reference = torch.randn(12, dtype=torch.float64)
    whole = rloo.loss(*columns, 5, 0.02, 0.1, reference)
    bounds = [0, *sorted(cuts), 12]
    parts = [rloo.loss(*(c[a:b] for c in columns), 5, 0.02, 0.1, reference[a:b]) for a, b in zip(bounds, bounds[1:])]
    torch.testing.assert_close(sum(parts), whole, **EXACT)


# The estimator


@pytest.mark.parametrize("group_size", [2, 3, 4])
def test_expected_gradient_is_the_gradient_of_the_expected_reward(group_size):
    """Unbiased, by enumeration: all 3^G groups of a three-armed bandit, weighted by their probability.

    The expectation must equal the closed form p_a (r_a - E r) to 1e-12. Dividing by the standard deviation must not: the
    test would see a bias.
    """
    theta = torch.tensor([0.3, -0.8, 0.5], dtype=torch.float64, requires_grad=True)
    reward = torch.tensor([1.0, 0.25, -0.4], dtype=torch.float64)
    p = theta.detach().softmax(-1)
    closed = p * (reward - (p * reward).sum())

    def expected_gradient(divide_by_std):
        total = torch.zeros(3, dtype=torch.float64)
        for group in itertools.product(range(3), repeat=group_size):
            actions = torch.tensor(group)
            logprobs = theta.log_softmax(-1)[actions]
            advantages = rloo.rloo_advantages(reward[actions][None], divide_by_std)[0]
            every = torch.ones(group_size, dtype=torch.bool)
            value = rloo.loss(logprobs, logprobs.detach(), advantages, every, group_size, 0.02)
            total -= p[actions].prod() * torch.autograd.grad(value, theta)[0]  # minus: the loss is descended
        return total

    torch.testing.assert_close(expected_gradient(False), closed, **EXACT)
    assert (expected_gradient(True) - closed).abs().max() > 0.01


def test_a_step_moves_the_chosen_logprobs_the_right_way():
    """B13: one plain gradient step of 1e-3; what had a positive advantage gets likelier, and the other way round."""
    model = tiny_model(tiny_config())
    rollouts = tiny_rollouts([(3, 4), (3, 4), (5, 1), (5, 1)], 37, seed=4)
    advantages = [1.0, -1.0, 0.5, -0.5]
    with torch.no_grad():
        before = [naive_logprobs(model, rollout, 1.0, 37) for rollout in rollouts]
    for rollout, logprobs in zip(rollouts, before):
        rollout.logprobs = logprobs.tolist()
    rloo.backward(model, None, [rloo.pack(rollouts, advantages)], 4, 1.0, 37, 0.02)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 1e-3 * parameter.grad
        after = [naive_logprobs(model, rollout, 1.0, 37) for rollout in rollouts]
    moved = [float(b.sum() - a.sum()) for a, b in zip(before, after)]
    assert moved[0] > 1e-4 and moved[1] < -1e-4 and moved[2] > 1e-4 and moved[3] < -1e-4, moved


# The whole path


@pytest.mark.parametrize("kl_coef, filter_groups", [(0.0, False), (0.2, False), (0.0, True)])
@pytest.mark.parametrize("tied", [True, False])
def test_whole_path_equals_the_naive_reference(tied, kl_coef, filter_groups):
    """Rewards -> advantages -> select -> schedule -> pack -> backward against full logits, one sequence at a time.

    Three groups: mixed with a reward in the middle (advantage exactly 0), all right, and one-token completions. The
    naive form runs every sequence; a group out of the batch has advantage 0 there and leaves the denominator.
    """
    model, reference = tiny_model(tiny_config(tied, vocab=41)), tiny_model(tiny_config(tied, vocab=41), seed=7)
    rewards = torch.tensor([[1.0, 0.5, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 1.0]])
    rollouts = tiny_rollouts([(4, 7), (4, 2), (4, 13), (6, 3), (6, 3), (6, 1), (2, 1), (2, 1), (2, 1)], 37)
    with torch.no_grad():  # log-probs near the trainer's: some ratios truncated, some not
        for i, rollout in enumerate(rollouts):
            rollout.logprobs = [p + 0.1 * math.sin(3 * i + t) for t, p in
                                enumerate(naive_logprobs(model, rollout, 0.8, 37).tolist())]  # fmt: skip
    advantages = rloo.rloo_advantages(rewards)
    assert (advantages == 0).sum() == 4
    denominator = 6 if filter_groups else 9
    naive = naive_loss(model, rollouts, advantages.flatten().tolist(), denominator, 0.8, 37, 0.02, kl_coef, reference)
    naive.backward()
    expected = gradients(model)
    assert all(g.abs().max() > 0 for g in expected.values())

    kept, found_denominator = rloo.select(advantages, kl_coef, filter_groups)
    assert found_denominator == denominator
    lengths = [len(rollouts[i].prompt) + len(rollouts[i].completion) - 1 for i in kept]
    for ranks, budget in ((1, 1000), (1, 18), (2, 18), (3, 5)):
        model.zero_grad()
        values, ratios = [], 0
        for rank in rloo.schedule(lengths, ranks, budget):
            batches = [rloo.pack([rollouts[kept[m]] for m in micro], [advantages.flatten()[kept[m]].item() for m in micro])
                       for micro in rank]  # fmt: skip
            value, _, log_ratios = rloo.backward(model, reference, batches, denominator, 0.8, 37, 0.02, kl_coef)
            values.append(value)
            ratios += len(log_ratios)
        assert distance(gradients(model), expected) < 1e-5, (ranks, budget)
        assert abs(sum(values) - naive.item()) < 1e-5 * max(1.0, abs(naive.item()))
        assert ratios == sum(len(rollouts[i].completion) for i in kept)
    assert all(p.grad is None for p in reference.parameters())


# Metrics


def test_gap_metrics_by_hand():
    ratios = torch.tensor([1.0, 1.01, 1.05, 0.5], dtype=torch.float64)
    found = rloo.gap_metrics(ratios.log(), 0.02)
    gaps = [0.0, math.log(1.01), math.log(1.05), math.log(2.0)]
    assert abs(found["logprob_gap_mean"] - sum(gaps) / 4) < 1e-12
    assert abs(found["logprob_gap_max"] - math.log(2)) < 1e-12
    assert found["truncated_share"] == 0.25
    assert abs(found["effective_sample_share"] - 3.56**2 / (1 + 1.01**2 + 1.05**2 + 0.25) / 4) < 1e-12
    assert rloo.gap_metrics(torch.zeros(0), 0.02) == {}


def test_gap_percentile():
    """A4: the mean hides a tail. Of 100 gaps 1 ... 100 the 95th percentile is 95, and of a single one itself."""
    gaps = torch.arange(1.0, 101.0)[torch.randperm(100)] / 100
    assert abs(rloo.gap_metrics(-gaps, 0.02)["logprob_gap_p95"] - 0.95) < 1e-6
    single = rloo.gap_metrics(torch.tensor([-0.5]), 0.02)
    assert single["logprob_gap_p95"] == single["logprob_gap_max"] == single["logprob_gap_mean"] == 0.5
    assert single["effective_sample_share"] == 1.0
