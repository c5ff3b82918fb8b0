"""Tokens in, tokens out: samples completions with a KV cache.

Owns prefill, the decode loop, sampling, stopping and the cache. Knows nothing of text, problems, rewards, optimisers
or processes.

Every rollout draws from a random stream of its own (`stream_key`), so what it samples does not depend on the batch it
shares, the slot it lands in, or the number of processes. Training samples at a temperature only; top-k and top-p are
for evaluation (a trainer that normalises over other tokens than the sampler would be biased).

P prompts, B rows decoding together, V vocabulary rows, H query heads, K key/value heads, Dh head width, S cache slots
of a row.
"""

import hashlib
from collections import deque
from dataclasses import dataclass, field

import torch

from model import PackedAttention

PREFILL_TOKENS = 16384  # one prefill call takes at most this many prompt tokens (or one prompt): bounds its memory
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64, the increment of SplitMix64


@dataclass
class Rollout:
    """One sampled completion. The stop token, when it was sampled, is the last token of `completion`."""

    prompt: list[int]
    completion: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of each completion token, under the distribution sampled
    finish_reason: str = "length"  # "stop": ended by a stop token; "length": cut at the limit


def stream_key(*names):
    """A 63-bit key from any values, such as (seed, step, problem, sample): the identity of one random stream."""
    digest = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def uniforms(keys, positions):
    """keys (B,), positions (B,), both int64 -> float64 (B,) in [0, 1): draw number `positions[i]` of stream `keys[i]`.

    SplitMix64 (Steele, Lea, Flood 2014) used as a counter-based generator: any draw is computed on the device from its
    key and position alone, so there is no generator state to keep, restore or share.
    """
    z = keys + (positions + 1) * _GOLDEN
    for shift, multiplier in ((30, -4658895280553007687), (27, -7723592293110705685)):
        z = (z ^ _shift_right(z, shift)) * multiplier
    z = z ^ _shift_right(z, 31)
    return _shift_right(z, 11).double() * 2.0**-53


def _shift_right(x, bits):
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # int64 has an arithmetic shift only: clear the copied sign bits


def sample(logits, temperature, uniforms, valid_vocab=None, top_k=0, top_p=1.0):
    """logits (B, V), uniforms float64 (B,) in [0, 1) -> tokens (B,) long, logprobs (B,) fp32.

    Inverse CDF of softmax(logits / temperature) over the first `valid_vocab` ids; temperature 0 takes the argmax and
    reports its untempered log-prob. The log-prob is always that of the distribution drawn from: with top-k or top-p the
    renormalised one. The CDF is summed in float64: in float32, at 151,936 ids, its end falls short of u near 1.
    """
    logits = logits[:, :valid_vocab].float()
    if temperature == 0:
        logprobs, tokens = logits.log_softmax(-1).max(-1)
        return tokens, logprobs
    logprobs = _truncate(logits / temperature, top_k, top_p).log_softmax(-1)
    cdf = logprobs.exp().cumsum(-1, dtype=torch.float64)
    end = cdf[:, -1]
    # rounding may bring u * end up to end itself, and the search past the last id: stay one step below
    threshold = torch.minimum(uniforms * end, torch.nextafter(end, torch.zeros_like(end)))
    tokens = torch.searchsorted(cdf, threshold[:, None], right=True)  # first id whose CDF exceeds it: its p is > 0
    tokens.clamp_(max=logprobs.shape[-1] - 1)  # changes rows of NaN only: their log-prob then says so
    return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]


def _truncate(logits, top_k, top_p):
    """-inf outside the top_k likeliest ids (ties stay), then outside the smallest set of probability top_p."""
    if top_k and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    if top_p < 1.0:
        ordered, ids = logits.sort(dim=-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1, dtype=torch.float64) - ordered.softmax(-1)
        outside = (before >= top_p).scatter(-1, ids, before >= top_p)
        outside.scatter_(-1, ids[:, :1], False)  # top_p = 0 keeps the most likely id
        logits = logits.masked_fill(outside, -torch.inf)
    return logits


def round_up(n):
    """The next multiple of 16, the step in which rows and cache slots are counted."""
    return -(-n // 16) * 16


class DenseCache:
    """Keys and values of B rows, one (B, K, S, Dh) tensor each a layer. The live rows are the first ones.

    B and S follow the need. Memory is zero-filled: a masked slot still enters a product, and 0 x garbage may be NaN.
    """

    def __init__(self, config, device, dtype):
        self.rows, self.capacity, self.scale = 0, 0, config.head_dim**-0.5
        empty = torch.zeros(0, config.num_key_value_heads, 0, config.head_dim, device=device, dtype=dtype)
        self.keys, self.values = [[empty] * config.num_hidden_layers for _ in range(2)]

    def reserve(self, rows, length, live):
        """Makes room for `rows` rows of `length` tokens, keeping the first `live`. By layers: never two caches at once.

        Growing longer gives up the rows that are gone: what few long sequences are left when most have finished cost
        no more than themselves.
        """
        if rows <= self.rows and length <= self.capacity:
            return
        if length > self.capacity:
            self.rows, self.capacity = round_up(rows), round_up(max(length, self.capacity * 3 // 2))
        self.rows = max(self.rows, round_up(rows))
        for store in (self.keys, self.values):
            for layer, old in enumerate(store):
                store[layer] = old.new_zeros(self.rows, old.shape[1], self.capacity, old.shape[3])
                store[layer][:live, :, : old.shape[2]] = old[:live]

    def move(self, source, target):
        """Overwrites row `target` by row `source`: how the last live row fills the hole that a finished one leaves."""
        for tensor in (*self.keys, *self.values):
            tensor[target] = tensor[source]

    def prefill(self, cu_seqlens, rows):
        """`attend` for whole prompts, packed. Prompt i is written to the rows of range rows[i], all of its group."""
        packed = PackedAttention(cu_seqlens, self.keys[0].device)

        def attend(layer, q, k, v):
            for start, end, group in zip(cu_seqlens, cu_seqlens[1:], rows):
                for store, new in ((self.keys, k), (self.values, v)):
                    store[layer][group.start : group.stop, :, : end - start] = new[start:end].transpose(0, 1)
            return packed(layer, q, k, v)

        return attend

    def decode(self, lengths, span):
        """`attend` for one new token in each of the first B rows, which hold lengths (B,) < span tokens already."""
        rows = torch.arange(len(lengths), device=lengths.device)
        future = torch.arange(span, device=lengths.device) > lengths[:, None]  # (B, span)
        bias = torch.zeros_like(future, dtype=torch.float32).masked_fill_(future, -torch.inf)[:, None, None]

        def attend(layer, q, k, v):
            keys, values = self.keys[layer], self.values[layer]
            keys[rows, :, lengths], values[rows, :, lengths] = k, v
            keys, values = keys[: len(rows), :, :span], values[: len(rows), :, :span]
            q = q.unflatten(1, (k.shape[1], -1))  # (B, K, H/K, Dh): no copy of keys for grouped queries
            # plain products, not scaled_dot_product_attention: their result does not depend on the number of threads
            scores = torch.add(bias, _product_fp32(q, keys.mT), alpha=self.scale)
            return (scores.softmax(-1).to(values.dtype) @ values).flatten(1, 2)  # (B, H, Dh)

        return attend


def _product_fp32(a, b):
    """a (B, K, n, Dh) @ b (B, K, Dh, S) in fp32: scores rounded to 16 bits would drive sampler and trainer apart."""
    if a.dtype == torch.float32:
        return a @ b
    if a.is_cuda:
        return torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32).unflatten(0, a.shape[:2])
    return a.float() @ b.float()


def affordable_rows(config, length, device, dtype):
    """How many rows of `length` tokens the dense cache can hold: on CUDA in 70 % of the free memory, else any number.

    Growing copies a layer at a time and scores need room as well: the rest is theirs. Not a budget that saves a run
    from everything, but no row count is ever started that the longest completions could not finish.
    """
    if device.type != "cuda":
        return 2**31
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize
    return max(16, int(0.7 * free) // (token * length) // 16 * 16)


class _Sampler:
    """The state of one `generate` call: which sequence sits in which row, and what is still to come."""

    def __init__(self, model, prompts, keys, limits, slots, stop_ids, draw, on_finish):
        self.model, self.prompts, self.limits, self.slots = model, prompts, limits, slots
        self.stop_ids, self.draw, self.on_finish = frozenset(stop_ids), draw, on_finish
        weight = model.head_weight
        self.device = weight.device
        self.cache = DenseCache(model.config, self.device, weight.dtype)
        self.keys = [key for group in keys for key in group]
        self.rollouts = [Rollout(prompt) for prompt, group in zip(prompts, keys) for _ in group]
        starts = [0]
        for group in keys:
            starts.append(starts[-1] + len(group))
        self.waiting = deque((p, range(a, b)) for p, (a, b) in enumerate(zip(starts, starts[1:])) if b > a)
        self.rows = []  # rows[i]: the sequence in cache row i
        self.tokens_drawn, self.longest = 0, 0  # sampled so far; tokens of the longest live sequence
        self.tokens, self.lengths, self.streams = (
            torch.zeros(round_up(slots), dtype=torch.long, device=self.device) for _ in range(3))  # fmt: skip

    def admit(self):
        """Prefills waiting prompts while their groups fit. A group larger than all slots together comes in parts."""
        cu_seqlens, tokens, groups = [0], [], []
        while self.waiting:
            prompt, members = self.waiting[0]
            free, ids = self.slots - len(self.rows), self.prompts[prompt]
            if free < min(len(members), self.slots) or (tokens and len(tokens) + len(ids) > PREFILL_TOKENS):
                break
            self.waiting.popleft()
            if members[free:]:
                self.waiting.appendleft((prompt, members[free:]))
            groups.append(range(len(self.rows), len(self.rows) + len(members[:free])))
            self.rows += members[:free]
            tokens += ids
            cu_seqlens.append(len(tokens))
        if groups:
            self._prefill(tokens, cu_seqlens, groups)

    def _prefill(self, tokens, cu_seqlens, groups):
        sizes = [end - start for start, end in zip(cu_seqlens, cu_seqlens[1:])]
        self.cache.reserve(len(self.rows), max(sizes), live=groups[0].start)
        positions = [position for size in sizes for position in range(size)]
        attend = self.cache.prefill(cu_seqlens, groups)
        hidden = self.model(self._long(tokens), self._long(positions), attend)
        logits = self.model.logits(hidden[self._long(cu_seqlens[1:]) - 1])  # (prompts, V)
        repeats = self._long([len(group) for group in groups])
        new = slice(groups[0].start, len(self.rows))
        self.lengths[new] = self._long(sizes).repeat_interleave(repeats)
        self.streams[new] = self._long([self.keys[s] for s in self.rows[new]])
        self._accept(new, logits.repeat_interleave(repeats, dim=0))  # expanded first: each member draws its own token

    def decode(self):
        """One token for every live row."""
        live = len(self.rows)
        # rows and span are padded to multiples of 16: matrix products then give a row the same bits in every batch, and
        # so does silu where intermediate_size is a multiple of 32, as Qwen3's are. The padding rows hold the old tokens
        # of finished sequences, harmless and unread.
        padded, span = round_up(live), round_up(self.longest)
        lengths = self.lengths[:padded].clamp(max=span - 1)
        hidden = self.model(self.tokens[:padded], lengths, self.cache.decode(lengths, span))
        self.lengths[:live] += 1
        self._accept(slice(0, live), self.model.logits(hidden)[:live])

    def _accept(self, rows, logits):
        """Draws the next token of `rows`, records it, and takes the rows that are finished out of the batch."""
        drawn = [len(self.rollouts[s].completion) for s in self.rows[rows]]
        tokens, logprobs = self.draw(logits, uniforms=uniforms(self.streams[rows], self._long(drawn)))
        self.tokens[rows] = tokens
        finished = []
        for row, token, logprob in zip(range(rows.start, rows.stop), tokens.tolist(), logprobs.tolist()):
            if logprob != logprob:
                raise FloatingPointError("the model's logits are not finite: its weights are damaged")
            rollout = self.rollouts[self.rows[row]]
            rollout.completion.append(token)
            rollout.logprobs.append(logprob)
            if token in self.stop_ids:
                rollout.finish_reason = "stop"
            if token in self.stop_ids or len(rollout.completion) >= self.limits[self.rows[row]]:
                finished.append(row)
        done = [self.rows[row] for row in finished]
        for row in reversed(finished):
            self._remove(row)
        for sequence in done:
            self.on_finish(sequence, self.rollouts[sequence])
        self.tokens_drawn += len(tokens)
        self.longest = max((self._length(s) for s in self.rows), default=0)  # the newest token is not in the cache yet
        self.cache.reserve(len(self.rows), self.longest, live=len(self.rows))

    def _length(self, sequence):
        return len(self.rollouts[sequence].prompt) + len(self.rollouts[sequence].completion)

    def _remove(self, row):
        last = len(self.rows) - 1
        if row != last:
            self.cache.move(last, row)
            for tensor in (self.tokens, self.lengths, self.streams):
                tensor[row] = tensor[last]
            self.rows[row] = self.rows[last]
        self.rows.pop()

    def _long(self, values):
        return torch.tensor(values, dtype=torch.long, device=self.device)


@torch.no_grad()
def generate(model, prompts, keys, *, max_new_tokens, max_length, temperature, stop_ids, valid_vocab,
             top_k=0, top_p=1.0, max_batch=256, progress=None, on_finish=None):  # fmt: skip
    """Samples len(keys[p]) completions of each prompt p; returns list[Rollout], group-major (prompt by prompt).

    model: a plain (not sharded) Qwen3 on its device. keys[p]: the `stream_key` of each sample of prompt p. A completion
    ends with a stop token, after max_new_tokens, or when prompt + completion reaches max_length. At most max_batch rows
    decode together; the others wait and join as rows finish. progress(finished, alive, tokens so far), if given, is
    called after every decode step; on_finish(index in the result, rollout) as soon as that completion has ended.
    FloatingPointError if the logits are not finite.
    """
    assert len(prompts) == len(keys), (len(prompts), len(keys))
    limits = [min(max_new_tokens, max_length - len(prompt)) for prompt, group in zip(prompts, keys) for _ in group]
    assert max_batch >= 1, max_batch
    assert all(prompts) and min(limits, default=1) >= 1, "every prompt needs a token, and room for a completion"
    if not limits:
        return []

    def draw(logits, uniforms):
        return sample(logits, temperature, uniforms, valid_vocab, top_k, top_p)

    weight, longest = model.head_weight, max(len(prompt) for prompt in prompts) + max(limits)
    rows = min(max_batch, len(limits), affordable_rows(model.config, longest, weight.device, weight.dtype))
    sampler = _Sampler(model, prompts, keys, limits, rows, stop_ids, draw, on_finish or (lambda index, rollout: None))
    while sampler.waiting or sampler.rows:
        sampler.admit()
        if sampler.rows:  # every new row may have ended with its first token
            sampler.decode()
        if progress:
            unfinished = len(sampler.rows) + sum(len(members) for _, members in sampler.waiting)
            progress(len(limits) - unfinished, len(sampler.rows), sampler.tokens_drawn)
    return sampler.rollouts
