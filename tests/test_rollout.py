"""rollout.py against one full forward a token, against naive samplers, and against itself in other batches.

Together these tests prove: what `generate` records is what the model says (cached decode = full forward, sampler's
log-probs = trainer's), `sample` draws exactly the distribution whose log-probs it reports, and a rollout is a function
of weights, prompt and key alone: batch, slot, order, split and threads change nothing.

Tolerances: 1e-5 on log-probs wherever fp32 sums are taken in another order (design.md 4.3). Tokens drawn in different
batches must be equal; where last bits differ (a CPU without MKL's strict mode) a differing token passes only if its
uniform lies within 1e-5 of the edge between the two tokens' intervals, which `assert_same_rollouts` checks.
"""

import itertools
import math
import random
from pathlib import Path

import pytest
import torch

import fsdp_utils
import rloo
import rollout
from model import PackedAttention, Qwen3, Qwen3Config
from rollout import Rollout, generate, sample, stream_key, uniforms

fsdp_utils.reproducible_matmul()  # at import, that is before any test file has multiplied anything

# Odd sizes. intermediate_size is a multiple of 32 all the same: torch computes the last numel % 32 values of silu with
# another exp than the others, so that with 72 the log-probs of a prompt would differ by 1e-6 between packed prefills.
SMALL = dict(vocab_size=101, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=6,
             num_key_value_heads=2, head_dim=20, max_position_embeddings=40960, rope_theta=1e6, rms_norm_eps=1e-6,
             tie_word_embeddings=False)  # fmt: skip
VALID = 97  # of 101 rows
ALMOST_ONE = 1 - 2.0**-53


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """A second thread costs more than it gives on these shapes: 8 s for 64 tokens, not 0.1, when a core is taken."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@torch.no_grad()
def random_model(scale=0.15, seed=0, **shape):
    """Sharp enough for log-probs of -6. At scale 0.2 rounding alone makes 1.1e-5, seen against the model in float64."""
    model = Qwen3(Qwen3Config(**{**SMALL, **shape}))
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.normal_(0.0, scale, generator=generator)
        if parameter.dim() == 1:  # a norm
            parameter.add_(1.0)
    return model


@pytest.fixture(scope="module")
def model():
    return random_model()


def prompts_of(*lengths, seed=1):
    rng = random.Random(seed)
    return [[rng.randrange(VALID) for _ in range(n)] for n in lengths]


def keys_of(prompts, samples, *names):
    return [[stream_key(*names, p, s) for s in range(samples)] for p in range(len(prompts))]


def run(model, prompts, keys, **options):
    defaults = dict(max_new_tokens=24, max_length=10**6, temperature=1.0, stop_ids=(3,), valid_vocab=VALID)
    return generate(model, prompts, keys, **{**defaults, **options})


@torch.no_grad()
def full_logits(model, rollout):
    """(n, VALID): logits before each completion token, from one forward over the whole sequence, without a cache."""
    tokens = torch.tensor(rollout.prompt + rollout.completion[:-1])
    hidden = model(tokens, torch.arange(len(tokens)), PackedAttention([0, len(tokens)]))
    return model.logits(hidden[len(rollout.prompt) - 1 :])[:, :VALID]


def assert_logprobs_of_full_forward(model, rollout, temperature=1.0, tolerance=1e-5):
    logprobs = (full_logits(model, rollout) / temperature).log_softmax(-1)
    drawn = logprobs.gather(1, torch.tensor(rollout.completion)[:, None])[:, 0]
    assert (drawn - torch.tensor(rollout.logprobs)).abs().max() <= tolerance


def assert_same_rollouts(model, ours, theirs, keys, temperature=1.0):
    """Equal tokens and log-probs to 1e-5, up to a token whose uniform lies within 1e-5 of the edge between the two."""
    assert len(ours) == len(theirs) == len(keys)
    for a, b, key in zip(ours, theirs, keys):
        assert a.prompt == b.prompt
        n = next((i for i, (x, y) in enumerate(zip(a.completion, b.completion)) if x != y), None)
        if n is None:
            assert (a.completion, a.finish_reason) == (b.completion, b.finish_reason)
        gaps = [abs(x - y) for x, y in zip(a.logprobs[:n], b.logprobs[:n])]
        assert max(gaps, default=0) <= 1e-5, max(gaps)
        if n is not None:
            cdf = (full_logits(model, a)[n].double() / temperature).softmax(-1).cumsum(-1)
            u = uniforms(torch.tensor([key]), torch.tensor([n])).item()
            low, high = sorted((a.completion[n], b.completion[n]))
            assert all(abs(u - cdf[edge].item()) < 1e-5 for edge in (low, high - 1)), (n, low, high, u)


def flat(keys):
    return [key for group in keys for key in group]


# Decode against the full forward, sampler against trainer


@pytest.mark.parametrize("shape", [{}, {"tie_word_embeddings": True}, {"num_key_value_heads": 6, "head_dim": 12}])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_decode_is_full_forward(shape, temperature):
    """Prompts of 1 to 70 tokens decode together; every recorded log-prob is that of a forward without a cache."""
    model = random_model(**shape)
    prompts = prompts_of(1, 70, 2, 15, 16, 17)
    rollouts = run(model, prompts, keys_of(prompts, 3), temperature=temperature, max_new_tokens=40,
                   stop_ids=range(0, VALID, 12))  # fmt: skip
    assert [r.prompt for r in rollouts] == [p for p in prompts for _ in range(3)]  # group-major
    assert len({len(r.completion) for r in rollouts}) > 5, "some must end early, so that rows move"
    for r in rollouts:
        assert len(r.logprobs) == len(r.completion) and all(p <= 0 for p in r.logprobs)
        assert_logprobs_of_full_forward(model, r, temperature)
    assert min(p for r in rollouts for p in r.logprobs) < -4, "a flat or certain model would prove nothing"


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.5])
def test_sampler_logprobs_are_trainer_logprobs(model, temperature):
    """The trainer divides by the same temperature and normalises over the same ids: in other projects it did not, and
    ratios were off by the kept mass (0.896) or by the temperature before a single step."""
    prompts = prompts_of(1, 33, 8)
    rollouts = run(model, prompts, keys_of(prompts, 4), temperature=temperature)
    batch = rloo.pack(rollouts, [1.0] * len(rollouts))
    logprobs, _ = rloo.token_logprobs(model, batch, temperature, VALID)
    gap = (logprobs - batch.rollout_logprobs)[batch.loss_mask].abs()
    assert len(gap) == sum(len(r.completion) for r in rollouts) > 100
    assert gap.max() <= 1e-5
    for other in ((temperature * 1.1, VALID), (temperature, 101)):  # another temperature, ids nobody could sample
        wrong, _ = rloo.token_logprobs(model, batch, *other)
        assert (wrong - batch.rollout_logprobs)[batch.loss_mask].abs().max() > 1e-2


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tokens_are_those_of_their_uniforms(model, temperature):
    """Token n of a rollout is where draw n of its stream falls in the CDF of a full forward, to 1e-5 at the edges."""
    prompts = prompts_of(1, 33, 8)
    keys = keys_of(prompts, 5)
    for r, key in zip(run(model, prompts, keys, temperature=temperature, max_batch=7), flat(keys)):
        cdf = (full_logits(model, r).double() / temperature).softmax(-1).cumsum(-1)
        numbers, ids = torch.arange(len(r.completion)), torch.tensor(r.completion)
        u = uniforms(torch.full_like(numbers, key), numbers)
        assert (u < cdf[numbers, ids] + 1e-5).all()
        assert (u > torch.where(ids > 0, cdf[numbers, ids - 1], 0.0) - 1e-5).all()


def check_long_context(model, positions):
    prompt = prompts_of(40)[0]
    result, = run(model, [prompt], [[5]], max_new_tokens=10**6, max_length=positions, stop_ids=())  # fmt: skip
    assert len(prompt) + len(result.completion) == positions and result.finish_reason == "length"
    assert len(set(result.completion[-100:])) > 10, "a loop would hide wrong positions"
    assert_logprobs_of_full_forward(model, result, tolerance=2e-5)


def test_long_context_short_form():
    """2,000 positions through a cache that grows from 48; sums over more keys, so 2e-5."""
    check_long_context(random_model(num_hidden_layers=2), 2000)


@pytest.mark.slow
def test_long_context_of_8192_positions():
    check_long_context(random_model(num_hidden_layers=2), 8192)


def test_cache_growth_keeps_what_is_there(model):
    """Rows that end, rows that join and a cache that grows in between, in every order of lengths."""
    prompts = prompts_of(1, 3, 100, 2, 250, 1, 7)
    keys = keys_of(prompts, 2)
    for max_batch in (2, 5):
        for r in run(model, prompts, keys, max_batch=max_batch, max_new_tokens=70):
            assert_logprobs_of_full_forward(model, r)


# The same rollout in any company


def bit_equal_expected():
    """MKL's strict mode exists on Intel CPUs with AVX2; elsewhere only the 1e-5 of the helper is promised."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    return torch.backends.mkl.is_available() and "GenuineIntel" in text and "avx2" in text


PROMPTS = prompts_of(8, 3, 1, 40, 17, 120, 5)


@pytest.fixture(scope="module")
def together(model):
    """(keys, rollouts) of 7 prompts x 6 samples, all in one batch."""
    keys = keys_of(PROMPTS, 6, 0)
    return keys, run(model, PROMPTS, keys)


def assert_equal(model, ours, theirs, keys):
    assert_same_rollouts(model, ours, theirs, keys)
    if bit_equal_expected():
        assert ours == theirs


@pytest.mark.parametrize("max_batch", [1, 2, 5, 6, 13, 16, 17, 41, 1000])
def test_same_rollouts_at_any_max_batch(model, together, max_batch):
    """Waiting groups join as rows finish, groups larger than the batch come in parts (5 and less), and nothing shows."""
    keys, rollouts = together
    assert_equal(model, run(model, PROMPTS, keys, max_batch=max_batch), rollouts, flat(keys))


def test_same_rollouts_in_any_order(model, together):
    keys, rollouts = together
    for seed in range(3):
        order = random.Random(seed).sample(range(7), 7)
        ours = run(model, [PROMPTS[p] for p in order], [keys[p] for p in order], max_batch=11)
        assert_equal(model, ours, [rollouts[6 * p + s] for p in order for s in range(6)], flat(keys[p] for p in order))


def test_shared_prefill_is_each_alone_and_any_split_of_the_groups(model, together):
    keys, rollouts = together
    alone = [run(model, [prompt], [[key]])[0] for prompt, group in zip(PROMPTS, keys) for key in group]
    assert_equal(model, alone, rollouts, flat(keys))
    part = run(model, PROMPTS, [group[::-1][2:5] for group in keys])
    assert_equal(model, part, [rollouts[6 * p + s] for p in range(7) for s in (3, 2, 1)],
                 flat(group[::-1][2:5] for group in keys))  # fmt: skip
    repeated = run(model, [p for p in PROMPTS for _ in range(2)], [g[i : i + 3] for g in keys for i in (0, 3)])
    assert_equal(model, repeated, rollouts, flat(keys))


def test_same_rollouts_on_any_number_of_threads(model, together):
    """World sizes 1 to 3 share the cores out differently. Threads split elementwise work, so the 1e-5 form is asked."""
    keys, rollouts = together
    torch.set_num_threads(2)
    try:
        ours = run(model, PROMPTS[:5], keys[:5], max_new_tokens=6)
    finally:
        torch.set_num_threads(1)
    one = run(model, PROMPTS[:5], keys[:5], max_new_tokens=6)
    assert_same_rollouts(model, ours, one, flat(keys[:5]))


def test_prefill_in_several_calls(model, together, monkeypatch):
    """PREFILL_TOKENS bounds one prefill; a prompt longer than it goes alone."""
    keys, rollouts = together
    monkeypatch.setattr(rollout, "PREFILL_TOKENS", 20)
    assert_equal(model, run(model, PROMPTS, keys), rollouts, flat(keys))


def test_the_comparison_itself_can_fail(model, together):
    keys, rollouts = together
    keys = flat(keys)
    for change in (
        lambda r: Rollout(r.prompt, [(r.completion[0] + 1) % VALID, *r.completion[1:]], r.logprobs, r.finish_reason),
        lambda r: Rollout(r.prompt, r.completion, [r.logprobs[0] + 2e-5, *r.logprobs[1:]], r.finish_reason),
        lambda r: Rollout(r.prompt, r.completion[:-1], r.logprobs[:-1], r.finish_reason),
        lambda r: Rollout(r.prompt, r.completion, r.logprobs, "stop" if r.finish_reason == "length" else "length"),
    ):
        with pytest.raises(AssertionError):
            assert_same_rollouts(model, [change(rollouts[4]), *rollouts[5:]], rollouts[4:], keys[4:])
    # and a token may differ where the uniform is at the edge: search a key whose first uniform is that close
    logits = full_logits(model, rollouts[0])[0].double()
    cdf = logits.softmax(-1).cumsum(-1)
    candidates = torch.arange(200000)
    draws = uniforms(candidates, torch.zeros_like(candidates))
    gaps, tokens = (draws[:, None] - cdf[None, :-1]).abs().min(1)
    best = gaps.argmin().item()
    assert gaps[best] < 1e-6
    a, b = (Rollout(PROMPTS[0], [tokens[best].item() + i], [-1.0], "length") for i in (0, 1))
    assert_same_rollouts(model, [a], [b], [best])


# Random streams


def test_members_of_a_group_differ_from_the_first_token_on(model):
    """The first token was once sampled before the group was expanded (nanochat PR 201), and streams were keyed without
    the sample index (all members equal). 64 first tokens over a distribution of entropy > 2 nats: the chance that fewer
    than 5 are distinct is below 1e-12."""
    group = run(model, PROMPTS[:1], [[stream_key(0, s) for s in range(64)]])
    logprobs = full_logits(model, group[0])[0].log_softmax(-1)
    assert -(logprobs.exp() * logprobs).sum() > 2
    assert len({r.completion[0] for r in group}) >= 5
    assert len({tuple(r.completion) for r in group}) > 55


def test_seeds_steps_and_problems_differ_and_repeat(model):
    def first(*names):
        return [r.completion for r in run(model, [PROMPTS[0]] * 2, keys_of([0, 1], 4, *names))]

    base = first(0, 0)
    assert base == first(0, 0)
    assert base[:4] != base[4:]  # the same prompt twice, as two problems
    assert all(x != y for other in (first(1, 0), first(0, 1)) for x, y in zip(base, other))


def test_stream_keys_name_their_parts():
    keys = {stream_key(*names) for names in itertools.product(range(6), repeat=4)}
    keys |= {stream_key(1, 23), stream_key(12, 3), stream_key("1", 23), stream_key((1, 23)), stream_key(0, "eval", 0, 0)}
    assert len(keys) == 6**4 + 5 and all(0 <= key < 2**63 for key in keys)
    assert stream_key(0, 0, 0, 0) == 3798811674703423765  # on every machine, in every process


def splitmix64(key, position):
    """Steele, Lea and Flood's generator, as published, in Python's own integers."""
    mask = 2**64 - 1
    z = (key + (position + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_uniforms_are_splitmix64():
    assert splitmix64(1234567, 0) == 6457827717110365317 and splitmix64(1234567, 1) == 3203168211198807973  # published
    rng = random.Random(0)
    pairs = [(rng.getrandbits(63), rng.randrange(40000)) for _ in range(2000)]
    pairs += [(key, n) for key in (0, 1, 2**63 - 1) for n in (0, 1, 2**31, 40000)]
    ours = uniforms(*(torch.tensor(column) for column in zip(*pairs)))
    assert ours.dtype == torch.float64
    assert ours.tolist() == [(splitmix64(*pair) >> 11) * 2.0**-53 for pair in pairs]


def test_uniforms_are_uniform_and_neighbours_independent():
    """256 bins of 2^18 draws and 16 x 16 bins of pairs (same position in neighbouring keys, neighbouring positions of a
    key): chi-square of 255 degrees of freedom stays below 400 with probability 1 - 1.4e-8 for true random numbers."""
    n = 2**18
    counter, zeros = torch.arange(n), torch.zeros(n, dtype=torch.long)
    key = torch.full((n,), stream_key(0))
    by_key, by_position = uniforms(counter, zeros), uniforms(key, counter)
    for bins in (by_key * 256, by_position * 256,
                 (by_key[:-1] * 16).floor() * 16 + by_key[1:] * 16,
                 (by_position[:-1] * 16).floor() * 16 + by_position[1:] * 16,
                 (by_key * 16).floor() * 16 + uniforms(counter, zeros + 1) * 16):  # fmt: skip
        counts = torch.bincount(bins.long(), minlength=256).double()
        assert len(counts) == 256
        expected = counts.sum() / 256
        assert ((counts - expected) ** 2 / expected).sum() < 400
    assert len(set(by_key.tolist())) == n and 0 <= by_key.min() and by_key.max() < 1


# sample


def grid(n):
    """The midpoints of n equal parts of [0, 1): draws that hit an interval of length p n*p times, give or take one."""
    return (torch.arange(n, dtype=torch.float64) + 0.5) / n


def draw_all(logits, temperature=1.0, n=20000, **options):
    """Tokens and log-probs of n evenly spaced uniforms for one row of logits."""
    return sample(logits.expand(n, -1), temperature, grid(n), **options)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_sample_draws_the_exact_distribution(temperature):
    """Evenly spaced uniforms: each id is drawn n*p times, one more or less. No luck involved."""
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0)) * 2
    p = (logits[0, :47].double() / temperature).softmax(-1)
    tokens, logprobs = draw_all(logits, temperature, valid_vocab=47)
    assert tokens.dtype == torch.long and logprobs.dtype == torch.float32
    assert (torch.bincount(tokens, minlength=47) - 20000 * p).abs().max() <= 1.01
    assert (logprobs - p.log()[tokens]).abs().max() <= 1e-5


def test_sample_frequencies_with_the_streams_it_is_used_with():
    """Chi-square of 39 degrees of freedom stays below 110 with probability 1 - 1e-8."""
    n = 100000
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(1))
    keys = torch.tensor([stream_key(0, 0, 0, i) for i in range(n)])
    tokens, _ = sample(logits.expand(n, -1), 1.0, uniforms(keys, torch.zeros(n, dtype=torch.long)))
    expected = n * logits[0].double().softmax(-1)
    assert expected.min() > 100
    assert ((torch.bincount(tokens, minlength=40) - expected) ** 2 / expected).sum() < 110


def test_sample_never_draws_probability_zero():
    """torch.multinomial drew ids of probability 0 in 0.158 % of draws (pytorch issue 48841). Here the first, last and
    inner ids are impossible, and the uniforms are those that land on the edges."""
    logits = torch.tensor([[-math.inf, -1e4, 0.0, -math.inf, -math.inf, 1.0, 0.0, -1e4, -math.inf]])
    edges = logits[0].softmax(-1).cumsum(-1, dtype=torch.float64)
    near = [f(e) for e in edges.tolist() for f in (float, lambda e: math.nextafter(e, 0), lambda e: math.nextafter(e, 1))]
    u = torch.tensor([0.0, 2.0**-53, ALMOST_ONE, *(min(e, ALMOST_ONE) for e in near)])
    tokens, logprobs = sample(logits.expand(len(u), -1), 1.0, u)
    assert set(tokens.tolist()) == {2, 5, 6} and logprobs.isfinite().all()
    assert tokens[0] == 2 and tokens[2] == 6


@pytest.mark.parametrize("scale", [0.0, 1.0, 5.0])
def test_sample_at_the_width_of_the_real_vocabulary(scale):
    """With a float32 sum over 151,936 ids u near 1 ran off the end in 7 of 16 rows. The token is the one of an exact
    float64 sum, or its edge is within 1e-6 (151,936 probabilities rounded to fp32, errors adding up at random)."""
    width, valid, n = 151936, 151669, 24
    logits = torch.randn(n, width, generator=torch.Generator().manual_seed(2)) * scale
    logits[:, valid:] = 100.0  # huge where nothing may be drawn
    u = uniforms(torch.arange(n), torch.zeros(n, dtype=torch.long))
    u[:8], u[8:12] = ALMOST_ONE, 0.0
    tokens, logprobs = sample(logits, 1.0, u, valid_vocab=valid)
    p = logits[:, :valid].double().softmax(-1)
    cdf = p.cumsum(-1)
    assert tokens.min() >= 0 and tokens.max() < valid
    chosen = tokens[:, None]
    assert (cdf.gather(1, chosen)[:, 0] > u - 1e-6).all()
    assert ((cdf - p).gather(1, chosen)[:, 0] < u + 1e-6).all()
    assert (logprobs - p.gather(1, chosen)[:, 0].log()).abs().max() <= 2e-5
    assert (tokens[8:12] == 0).all() and (tokens[:8] > valid - 1000).all()


def test_sample_can_draw_ids_less_likely_than_an_fp32_step():
    """1,000 ids of probability 1e-10 behind one of almost 1: the CDF rises by 1e-10 an id, which float32 (steps of 6e-8
    below 1) would make one or two jumps of."""
    logits = torch.tensor([[0.0, *[math.log(1e-10)] * 1000]])
    u = 1 - torch.linspace(0, 9e-8, 901, dtype=torch.float64)[1:]
    tokens, _ = sample(logits.expand(900, -1), 1.0, u)
    assert len(set(tokens.tolist())) > 300 and (tokens.diff() <= 0).all()


def test_sample_at_temperature_zero():
    logits = torch.tensor([[0.0, 3.0, 1.0, 9.0], [2.0, -1.0, 0.0, 9.0]])
    tokens, logprobs = sample(logits, 0, torch.tensor([0.0, ALMOST_ONE], dtype=torch.float64), valid_vocab=3)
    assert tokens.tolist() == [1, 0]
    assert (logprobs - logits[:, :3].log_softmax(-1).max(-1).values).abs().max() <= 1e-6  # the untempered log-prob
    cold, _ = sample(logits, 1e-4, torch.tensor([0.5, 0.5], dtype=torch.float64), valid_vocab=3)
    assert cold.tolist() == [1, 0]


def naive_kept(p, top_k, top_p):
    """Probabilities of the ids kept, in descending order, by the definitions. Ids tied with the k-th are all kept (as
    transformers does); of ids tied at top_p's edge only as many as are needed, whichever they are."""
    ordered = sorted(p, reverse=True)
    if top_k:
        ordered = [x for x in ordered if x >= ordered[min(top_k, len(ordered)) - 1]]
    total, kept = sum(ordered), []
    for x in ordered:
        if kept and sum(kept) >= top_p * total - 1e-9:
            break
        kept.append(x)
    return kept


@pytest.mark.parametrize("top_k, top_p", [(1, 1.0), (5, 1.0), (29, 1.0), (30, 1.0), (1000, 1.0), (0, 0.9), (0, 0.3),
                                          (0, 0.0), (0, 1e-9), (7, 0.8), (3, 0.999), (20, 0.0)])  # fmt: skip
@pytest.mark.parametrize("kind", ["random", "ties", "peaked"])
def test_top_k_and_top_p_against_a_naive_reference(top_k, top_p, kind):
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(3))
    logits = {"random": logits, "ties": logits.round(), "peaked": logits * 4}[kind]
    temperature = 0.8
    p = (logits[0].double() / temperature).softmax(-1)
    kept = naive_kept(p.tolist(), top_k, top_p)
    tokens, logprobs = draw_all(logits, temperature, top_k=top_k, top_p=top_p)
    counts = torch.bincount(tokens, minlength=30)
    alive = counts.nonzero()[:, 0]
    seen = sorted(p[alive].tolist(), reverse=True)
    drawable = [x for x in kept if x / sum(kept) > 1e-4]  # the grid of 20,000 misses smaller ones
    assert len(drawable) <= len(seen) <= len(kept)
    assert seen[: len(drawable)] == pytest.approx(drawable, abs=1e-12)
    assert (counts[alive] - 20000 * p[alive] / sum(kept)).abs().max() <= 1.01
    assert (logprobs.double() - (p[tokens] / sum(kept)).log()).abs().max() <= 1e-5  # renormalised


def test_top_p_at_an_exact_edge_takes_no_more_than_needed():
    for top_p, needed in ((0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (1.0, 4)):
        tokens, logprobs = draw_all(torch.zeros(1, 4), n=1000, top_p=top_p)
        assert len(set(tokens.tolist())) == needed
        assert (logprobs + math.log(needed)).abs().max() <= 1e-6


def test_top_k_and_top_p_ignore_ids_beyond_the_tokenizer():
    logits = torch.tensor([[1.0, 2.0, 3.0, 50.0, 50.0]])
    for options in ({"top_k": 2}, {"top_p": 0.5}):
        tokens, _ = draw_all(logits, valid_vocab=3, n=1000, **options)
        assert 2 in tokens and tokens.max() <= 2


# Stopping, limits, greedy


def test_greedy_is_the_naive_argmax_loop(model):
    prompts = prompts_of(1, 9, 30)
    for r in run(model, prompts, keys_of(prompts, 2), temperature=0, stop_ids=(), max_new_tokens=30):
        tokens = list(r.prompt)
        for token in r.completion:
            logits = full_logits(model, Rollout(tokens, [0]))
            assert logits.argmax() == token
            tokens.append(token)
        assert_logprobs_of_full_forward(model, r)
        assert len(set(r.completion)) > 3


def test_stop_tokens_are_kept_and_end_the_completion(model):
    """A sampled end token that is dropped, or masked, is a decision to stop that never gets a gradient."""
    prompts, stops = prompts_of(4, 11), (3, 50, 96)
    rollouts = run(model, prompts, keys_of(prompts, 100), stop_ids=stops, max_new_tokens=30)
    ends = set()
    for r in rollouts:
        assert not set(r.completion[:-1]) & set(stops)
        assert (r.finish_reason == "stop") is (r.completion[-1] in stops)
        assert r.finish_reason == "stop" or len(r.completion) == 30
        ends.add(r.completion[-1] if r.finish_reason == "stop" else None)
    assert ends == {*stops, None}  # every stop id and the limit were met
    unstopped = run(model, prompts, keys_of(prompts, 100), stop_ids=(), max_new_tokens=30)
    for r, longer in zip(rollouts, unstopped):  # stopping changes nothing before it
        assert longer.completion[: len(r.completion)] == r.completion and len(longer.completion) == 30


def test_stop_token_at_the_limit_is_a_stop(model):
    rollouts = run(model, PROMPTS[:1], [[stream_key(s) for s in range(300)]], max_new_tokens=1, stop_ids=range(0, 97, 2))
    assert {r.finish_reason for r in rollouts} == {"stop", "length"}
    assert all(len(r.completion) == 1 and (r.finish_reason == "stop") is (r.completion[0] % 2 == 0) for r in rollouts)


def test_both_length_limits(model):
    prompts = prompts_of(1, 20, 5, 29)
    rollouts = run(model, prompts, keys_of(prompts, 2), stop_ids=(), max_new_tokens=12, max_length=30)
    assert [len(r.completion) for r in rollouts] == [12, 12, 10, 10, 12, 12, 1, 1]
    assert {r.finish_reason for r in rollouts} == {"length"}
    for short in (prompts_of(30), [[]]):
        with pytest.raises(AssertionError):
            run(model, short, [[0]], max_length=30)


def test_ids_beyond_the_tokenizer_are_never_sampled():
    """Qwen3's logits have 151,936 rows and its tokenizer 151,669 ids: at temperature 1.2 such ids were drawn, and
    decoded to nothing. Here those rows have by far the largest logits."""
    model = random_model()
    with torch.no_grad():
        model.lm_head.weight[VALID:] = 50 * model.lm_head.weight[:4]
    for options in ({}, {"temperature": 1.5}, {"temperature": 0}, {"top_k": 3}, {"top_p": 0.9}):
        rollouts = run(model, PROMPTS[:3], keys_of(PROMPTS[:3], 8), **options)
        assert max(max(r.completion) for r in rollouts) < VALID
    hidden = model(torch.tensor(PROMPTS[0]), torch.arange(8), PackedAttention([0, 8]))
    assert (model.logits(hidden).argmax(-1) >= VALID).any()


def test_top_k_reaches_the_sampler(model):
    for r in run(model, PROMPTS[:2], keys_of(PROMPTS[:2], 4), top_k=2):
        rank = (full_logits(model, r) > full_logits(model, r).gather(1, torch.tensor(r.completion)[:, None])).sum(1)
        assert rank.max() <= 1 and max(r.logprobs) <= 0 and min(r.logprobs) > -3


# Batching at its edges


def test_empty_input(model):
    assert run(model, [], []) == []
    assert run(model, [[1]], [[]]) == []
    one, = run(model, [[1], [2], [3]], [[], [7], []])  # fmt: skip
    assert one.prompt == [2]


def test_everything_ends_with_its_first_token(model):
    """Rows that are finished by their prefill leave nothing to decode, and the next groups must still come."""
    for max_batch in (1, 3, 100):
        rollouts = run(model, PROMPTS, keys_of(PROMPTS, 3), max_new_tokens=1, max_batch=max_batch)
        assert [len(r.completion) for r in rollouts] == [1] * 21
        assert [len(r.completion) for r in run(model, PROMPTS, keys_of(PROMPTS, 3), stop_ids=range(VALID))] == [1] * 21


def test_no_more_rows_than_max_batch_decode_together(model, monkeypatch):
    """And no fewer while there is work: freed rows are filled again before everything has finished."""
    seen, prefills = [], []
    decode, prefill = rollout._Sampler.decode, rollout._Sampler._prefill
    monkeypatch.setattr(rollout._Sampler, "decode", lambda self: (seen.append(len(self.rows)), decode(self)))
    monkeypatch.setattr(rollout._Sampler, "_prefill", lambda self, *a: (prefills.append(len(seen)), prefill(self, *a)))
    prompts = prompts_of(*[4] * 30)
    run(model, prompts, keys_of(prompts, 2), max_batch=6, stop_ids=range(10))
    assert max(seen) == 6 and len(prefills) > 5 and len(set(prefills)) == len(prefills)
    assert sum(seen) / len(seen) > 4
    seen.clear()
    run(model, prompts[:2], keys_of(prompts[:2], 20), max_batch=6)
    assert max(seen) == 6


def test_progress_counts_every_completion(model):
    calls = []
    rollouts = run(model, PROMPTS, keys_of(PROMPTS, 5), max_batch=8, progress=lambda *numbers: calls.append(numbers))
    done, alive, drawn = zip(*calls)
    assert list(done) == sorted(done) and list(drawn) == sorted(drawn)
    assert calls[-1] == (35, 0, sum(len(r.completion) for r in rollouts)) and max(alive) <= 8
    assert len(set(done)) > 5


def test_every_completion_is_announced_once_when_it_ends(model):
    seen = {}

    def finished(index, rollout):
        assert index not in seen
        seen[index] = list(rollout.completion)

    rollouts = run(model, PROMPTS, keys_of(PROMPTS, 5), max_batch=8, on_finish=finished)
    assert [seen[i] for i in range(35)] == [r.completion for r in rollouts]
    assert list(seen) != sorted(seen), "in the order in which they end"


def test_generate_leaves_no_graph_and_no_change_behind(model):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    prompts = [list(p) for p in PROMPTS]
    run(model, prompts, keys_of(prompts, 2))
    assert prompts == PROMPTS and all(p.grad is None and p.requires_grad for p in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
