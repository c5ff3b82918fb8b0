"""The algorithm: REINFORCE with a leave-one-out baseline. No critic, no clipped surrogate, one update per batch.

Owns rewards -> advantages, the split of rollouts over ranks and micro-batches, the packed batch (the only place where
targets are shifted), token log-probs, the loss and what is measured about it. Knows nothing of text, of how tokens were
sampled, of optimisers or processes: denominators and rank counts arrive as numbers.

P problems a step, G rollouts a problem, T tokens of a packed row, N of them trained, V vocabulary rows, D model width.
"""

from dataclasses import dataclass, fields

import torch

from model import PackedAttention, matmul_fp32
from rollout import Rollout

# logits held at once by the head, fp32: 64 MiB a tensor on CPU, 1 GiB on GPUs (each chunk also costs a pass over the
# gradient of the whole head); three such tensors at the peak
CHUNK_ELEMENTS = {"cpu": 2**24, "cuda": 2**28}


def discounted(rewards, lengths, gamma):
    """rewards (P, G), completion lengths (P, G) -> rewards * gamma^length, float64."""
    return rewards.double() * gamma ** lengths.double()


def rloo_advantages(rewards, divide_by_std=False):
    """rewards (P, G) -> advantages (P, G) float64: each reward minus the mean of the other G - 1 of its group.

    REINFORCE leave-one-out: Kool et al. 2019; Ahmadian et al. 2024, eq. 7. Unbiased, because the baseline of a rollout
    does not depend on it. Each row sums to 0. A group of equal rewards gets exact zeros, whatever the rounding.
    divide_by_std: also divide by the group's sample standard deviation (n - 1) plus 1e-4, as GRPO does.
    """
    rewards = rewards.double()
    group_size = rewards.shape[1]
    assert group_size >= 2, f"leave-one-out needs at least 2 rollouts a problem, got {group_size}"
    advantages = rewards - (rewards.sum(1, keepdim=True) - rewards) / (group_size - 1)
    if divide_by_std:
        advantages = advantages / (rewards.std(1, keepdim=True) + 1e-4)
    return advantages.masked_fill((rewards == rewards[:, :1]).all(1, keepdim=True), 0.0)


def select(advantages, kl_coef=0.0, filter_groups=False):
    """advantages (P, G) -> the flat indices of the sequences to run, and the loss's denominator B.

    A sequence without advantage has no gradient unless the KL term is on: it is not run, and still counted in B.
    filter_groups takes groups without signal out of both; B may then be 0, and there is nothing to step on.
    """
    signal = (advantages != 0).any(1, keepdim=True).expand_as(advantages)
    run = torch.ones_like(signal) if kl_coef else advantages != 0
    if filter_groups:
        return (run & signal).flatten().nonzero()[:, 0].tolist(), int(signal.sum())
    return run.flatten().nonzero()[:, 0].tolist(), advantages.numel()


def schedule(lengths, world, max_tokens):
    """Splits sequences of the given lengths over ranks and micro-batches: plan[rank][micro_batch] = [indices].

    Longest first to the least loaded rank (Graham 1969), then first-fit decreasing into micro-batches of at most
    max_tokens (a longer sequence gets one of its own). Every rank has the same number of micro-batches, at least one;
    those without work are empty. A pure function: every rank computes the whole plan and takes its row.
    """
    loads, shares = [0] * world, [[] for _ in range(world)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = loads.index(min(loads))
        loads[rank] += lengths[index]
        shares[rank].append(index)
    plan = [_first_fit(share, lengths, max_tokens) for share in shares]
    count = max(1, *map(len, plan))
    return [micro_batches + [[]] * (count - len(micro_batches)) for micro_batches in plan]


def _first_fit(indices, lengths, capacity):
    bins, room = [], []
    for index in indices:
        target = next((b for b, left in enumerate(room) if lengths[index] <= left), None)
        if target is None:
            target = len(bins)
            bins.append([])
            room.append(capacity)
        bins[target].append(index)
        room[target] -= lengths[index]
    return bins


@dataclass
class PackedBatch:
    """Sequences end to end in one row of T tokens, everything indexed by target: no `[1:]` after this point."""

    tokens: torch.Tensor  # (T,) long, the inputs
    targets: torch.Tensor  # (T,) long, the token that follows each input
    positions: torch.Tensor  # (T,) long, place of the input in its own sequence
    loss_mask: torch.Tensor  # (T,) bool, True where the target is a sampled token (the stop token included)
    advantages: torch.Tensor  # (T,) fp32, of the target's rollout; 0 at prompt targets
    rollout_logprobs: torch.Tensor  # (T,) fp32, what the sampler recorded; 0 at prompt targets
    cu_seqlens: list[int]  # [0, ..., T], boundaries of the sequences, on the host

    def to(self, device):
        """The same batch on another device."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return PackedBatch(**{k: v.to(device, non_blocking=True) if torch.is_tensor(v) else v for k, v in values})


def pack(rollouts, advantages):
    """list[Rollout] and one advantage each -> PackedBatch. No rollouts: one token with nothing to train.

    The placeholder keeps a rank without work in step: it runs the same forward and backward, and adds zeros.
    """
    if not rollouts:
        rollouts, advantages = [Rollout(prompt=[0], completion=[0], logprobs=[0.0])], [0.0]
        trained = False
    else:
        trained = True
    columns, cu_seqlens = ([], [], [], [], [], []), [0]
    for rollout, advantage in zip(rollouts, advantages):
        assert len(rollout.completion) == len(rollout.logprobs) >= 1, "every completion token needs its log-prob"
        # the first token of the prompt is nobody's target: one untrained target less than prompt tokens
        sequence, untrained, n = rollout.prompt + rollout.completion, len(rollout.prompt) - 1, len(rollout.completion)
        for column, values in zip(columns, (
            sequence[:-1], sequence[1:], range(untrained + n), [False] * untrained + [trained] * n,
            [0.0] * untrained + [advantage] * n, [0.0] * untrained + rollout.logprobs,
        )):  # fmt: skip
            column.extend(values)
        cu_seqlens.append(len(columns[0]))
    dtypes = (torch.long, torch.long, torch.long, torch.bool, torch.float32, torch.float32)
    return PackedBatch(*(torch.tensor(c, dtype=d) for c, d in zip(columns, dtypes)), cu_seqlens)


class _HeadLogprobs(torch.autograd.Function):
    """Log-prob of each target and entropy of each row under softmax(hidden @ weight.T / temperature), by chunks.

    Neither the logits of all rows nor their gradient ever exist: forward keeps (N,) numbers, backward computes the
    logits of each chunk again. Costs one more product with the head; saves N x V x 8 bytes and more.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, valid_vocab, chunk):
        ctx.save_for_backward(hidden, weight, targets)
        ctx.constants = temperature, valid_vocab, chunk
        logprobs, entropy = (torch.empty(len(hidden), device=hidden.device) for _ in range(2))
        for rows in _chunks(len(hidden), chunk):
            logits = matmul_fp32(hidden[rows], weight[:valid_vocab]).div_(temperature).log_softmax(-1)  # (chunk, V)
            logprobs[rows] = logits.gather(-1, targets[rows, None])[:, 0]
            entropy[rows] = -(logits.exp() * logits).sum(-1)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, _):
        hidden, weight, targets = ctx.saved_tensors
        temperature, valid_vocab, chunk = ctx.constants
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, device=weight.device)  # fp32: hundreds of chunks are added up
        for rows in _chunks(len(hidden), chunk):
            # d logprob / d logits = (one-hot(target) - softmax) / temperature
            grad = matmul_fp32(hidden[rows], weight[:valid_vocab]).div_(temperature).softmax(-1).neg_()
            grad.scatter_add_(-1, targets[rows, None], torch.ones_like(grad[:, :1]))
            grad.mul_(grad_logprobs[rows, None] / temperature)
            grad = grad.to(hidden.dtype)
            grad_hidden[rows] = grad @ weight[:valid_vocab]
            _add_product(grad_weight[:valid_vocab], grad.T, hidden[rows])
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def _chunks(length, size):
    return [slice(start, start + size) for start in range(0, length, size)]


def _add_product(total, a, b):
    """total (fp32) += a @ b, accumulated in fp32 also when a and b are 16-bit."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    elif a.is_cuda:
        total.add_(torch.mm(a, b, out_dtype=torch.float32))
    else:
        total.addmm_(a.float(), b.float())


def token_logprobs(model, batch, temperature, valid_vocab, chunk_elements=None):
    """PackedBatch -> logprobs (T,) with gradient and entropy (T,) without, fp32, both 0 where loss_mask is False.

    The distribution is the sampler's: tempered, over the ids below valid_vocab only. model may be sharded.
    """
    hidden = model(batch.tokens, batch.positions, PackedAttention(batch.cu_seqlens, batch.tokens.device))
    trained = batch.loss_mask.nonzero()[:, 0]  # (N,)
    chunk = max(1, (chunk_elements or CHUNK_ELEMENTS[hidden.device.type]) // valid_vocab)
    values = _HeadLogprobs.apply(
        hidden[trained], model.head_weight, batch.targets[trained], temperature, valid_vocab, chunk
    )
    return [torch.zeros(len(batch.tokens), device=hidden.device).index_put((trained,), v) for v in values]


def loss(logprobs, rollout_logprobs, advantages, loss_mask, denominator, epsilon, kl_coef=0.0, ref_logprobs=None):
    """All (T,) -> scalar: this micro-batch's part of

        1/B sum_i sum_t [ -A_i min(rho_it, 1 + epsilon) log p(y_it) + kl_coef (exp(d_it) - d_it - 1) ]

    with rho = exp(logprobs - rollout_logprobs), a weight that is never differentiated (truncated importance sampling),
    and d = ref_logprobs - logprobs (Schulman's k3 estimate of the KL divergence). The denominator B is the number of
    sequences of the whole step over all ranks, so any split into micro-batches and ranks sums to the same gradient. No
    division by length. The VALUE is minus a covariance of advantage and log-prob: its sign and size say nothing about
    progress.
    """
    weight = (logprobs.detach() - rollout_logprobs).exp().clamp(max=1.0 + epsilon)
    per_token = -advantages * weight * logprobs
    if kl_coef:
        d = ref_logprobs - logprobs
        per_token = per_token + kl_coef * (d.exp() - d - 1.0)
    return torch.where(loss_mask, per_token, 0.0).sum() / denominator


def backward(model, reference, batches, denominator, temperature, valid_vocab, epsilon, kl_coef=0.0):
    """Adds the gradient of all micro-batches to model's -> (loss, sum of token entropies, log_ratios (N,) on the host).

    reference: the initial model, needed when kl_coef is not 0. log_ratios: trainer's minus sampler's log-probs.
    """
    total_loss, total_entropy, log_ratios = 0.0, 0.0, []
    for batch in batches:
        ref_logprobs = None
        if kl_coef:
            with torch.no_grad():
                ref_logprobs, _ = token_logprobs(reference, batch, temperature, valid_vocab)
        logprobs, entropy = token_logprobs(model, batch, temperature, valid_vocab)
        part = loss(logprobs, batch.rollout_logprobs, batch.advantages, batch.loss_mask, denominator,
                    epsilon, kl_coef, ref_logprobs)  # fmt: skip
        part.backward()
        total_loss, total_entropy = total_loss + part.detach(), total_entropy + entropy.sum()
        log_ratios.append((logprobs.detach() - batch.rollout_logprobs)[batch.loss_mask])
    return float(total_loss), float(total_entropy), torch.cat(log_ratios).cpu()


def gap_metrics(log_ratios, epsilon):
    """log_ratios (N,): trainer's minus sampler's log-prob of every trained token -> how far the two disagree.

    effective_sample_share: (sum rho)^2 / (N sum rho^2) of the ratios before truncation, 1 when the two agree.
    """
    if not len(log_ratios):
        return {}
    gap, ratio = log_ratios.double().abs(), log_ratios.double().exp()
    return {
        "logprob_gap_mean": gap.mean().item(),
        "logprob_gap_p95": gap.kthvalue(max(1, round(0.95 * len(gap)))).values.item(),
        "logprob_gap_max": gap.max().item(),
        "truncated_share": (ratio > 1.0 + epsilon).double().mean().item(),
        "effective_sample_share": (ratio.sum() ** 2 / (ratio**2).sum() / len(ratio)).item(),
    }
