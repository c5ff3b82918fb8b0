"""estimates.py against enumeration, simulated populations and the published table.

Together: pass@k is the unbiased estimate and is refused where there is none, a vote is what a count by hand gives, an
interval holds the truth as often as it says, and the table weights Overall as the reference recipe does.
"""

import itertools
import math
import random
from fractions import Fraction

import numpy
import pytest

from console import UserError
from estimates import by_label, majority_at_k, pass_at_k, scores, summarize, table


def samples(correct, answers=None):
    """Records of one problem: correct[i], and the answer's text (None: none)."""
    answers = answers or ["7" if c else "8" for c in correct]
    return [{"correct": c, "reason": "right" if c else "wrong" if a else "no answer", "answer": a, "tokens": 10 + i,
             "finish_reason": "stop" if a else "length"} for i, (c, a) in enumerate(zip(correct, answers))]  # fmt: skip


def test_pass_at_k_is_the_exact_enumeration():
    """All subsets of k of n samples, the first c of which are right. 1e-12: one division of integers in float64."""
    for n in range(1, 7):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            subsets = list(itertools.combinations(range(n), k))
            exact = Fraction(sum(any(i < c for i in subset) for subset in subsets), len(subsets))
            assert math.isclose(pass_at_k(n, c, k), exact, abs_tol=1e-12), (n, c, k)
    assert pass_at_k(4, 1, 4) == 1 and pass_at_k(32, 0, 32) == 0 and pass_at_k(6, 6, 1) == 1
    assert pass_at_k(1000, 1, 500) == pytest.approx(0.5)  # no overflow either


@pytest.mark.parametrize("n, k", [(2, 5), (4, 5), (1, 2), (3, 0), (3, -1)])
def test_pass_at_k_beyond_the_samples_is_refused(n, k):
    """estimate_pass_at_k([2], [0], 5) gave 1.0 without a single right sample (openai/human-eval issue 35)."""
    with pytest.raises(UserError, match=f"pass@{k}"):
        pass_at_k(n, 0, k)


@pytest.mark.parametrize("correct, answers, expected", [
    ([True, True, False, False], ["7", "7", "8", "9"], 1.0),
    ([True, False, False, False], ["7", "8", "8", "9"], 0.0),
    ([True, False, False, False], ["7", "8", "9", "10"], 0.25),  # four answers share
    ([True, True, False, False], ["7", "7.0", "8", "8"], 0.5),  # right answers are one class however they are written
    ([True, False, False, False], ["7", r"\dfrac{1}{2}", r"\frac{1}{2}", "9"], 0.0),  # and spelling is no answer
    ([False, False, False, True], [None, None, None, "7"], 1.0),  # no answer, no vote
    ([False, False, False, False], [None, None, None, None], 0.0),
    ([False, True, False, False], ["right", "7", "True", "True"], 0.0),  # an answer that reads "True" is not the right one
])  # fmt: skip
def test_majority_is_a_vote(correct, answers, expected):
    assert majority_at_k(samples(correct, answers), 4) == expected


def test_majority_of_fewer_is_the_mean_over_disjoint_runs():
    records = samples([True, True, False, False, True], ["7", "7", "8", "8", "7"])
    assert majority_at_k(records, 2) == 0.5 and majority_at_k(records, 1) == 0.6  # the fifth is no run of two
    assert majority_at_k(samples([True, False]), 2) == 0.5


def test_scores_of_a_problem():
    found = scores(samples([True, False, False, False], ["7", "8", None, None]))
    assert found == {"pass@1": 0.25, "pass@2": 0.5, "pass@4": 1.0, "maj@2": 0.25, "maj@4": 0.5,
                     "length": 11.5, "cut": 0.5, "no_answer": 0.5}  # fmt: skip
    assert "maj@4" not in scores(samples([True] * 4), voting=False)
    assert list(scores(samples([True] * 6))) == ["pass@1", "pass@2", "pass@4", "maj@2", "maj@4", "length", "cut", "no_answer"]


def test_interval_holds_the_truth_as_often_as_it_says():
    """1,000 evaluations of 200 problems x 16 samples, whose chances come from a wide population: the 95 % interval of
    pass@1, 4 and 8 must hold the population's value in 93 to 97 % (its own standard error is 0.7 %)."""
    draw = numpy.random.default_rng(7)
    truth = {k: numpy.mean(1 - (1 - draw.beta(0.7, 0.9, 2_000_000)) ** k) for k in (1, 4, 8)}
    hits = dict.fromkeys(truth, 0)
    passes = {k: [pass_at_k(16, c, k) for c in range(17)] for k in truth}
    for _ in range(1000):
        right = draw.binomial(16, draw.beta(0.7, 0.9, 200))
        found = summarize([{k: passes[k][c] for k in truth} for c in right], resamples=1000)
        for k in truth:
            hits[k] += found[k][1] <= truth[k] <= found[k][2]
    assert all(930 <= count <= 970 for count in hits.values()), hits


def test_summary_is_seeded_ordered_and_right():
    draw = random.Random(1)
    problems = [scores(samples([draw.random() < 0.3 for _ in range(4)])) for _ in range(60)]
    found = summarize(problems)
    assert found == summarize(problems)
    for name, (mean, low, high) in found.items():
        assert mean == pytest.approx(sum(p[name] for p in problems) / 60, abs=1e-12) and low <= mean <= high
    assert summarize(problems[:1])["pass@1"] == (problems[0]["pass@1"],) * 3
    # Efron 1979: the bootstrap's spread of a mean is its standard error; 5 %: 2,000 draws of a percentile
    values = numpy.array([p["length"] + p["pass@1"] for p in problems])
    mean, low, high = summarize([{"x": v} for v in values])["x"]
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 60**0.5, rel=0.08)


def test_table_weights_overall_by_problems():
    """The reference recipe's own numbers: 1,319 problems at 80.72 and 500 at 69.94 are 77.76 overall, not 75.33. The
    published Overall row follows from the published rows within 0.01."""
    published = {"GSM8K": (80.72, 87.23, 91.39, 94.06, 95.75, 96.66), "MATH-500": (69.94, 78.31, 84.41, 88.71, 91.69, 93.80)}
    overall, sizes = (77.76, 84.78, 89.47, 92.59, 94.63, 95.88), {"GSM8K": 1319, "MATH-500": 500}
    rest = {"maj@32": 0.5, "length": 100.0, "cut": 0.25, "no_answer": 0.125}
    scored = {name: [{**{f"pass@{2**i}": v / 100 for i, v in enumerate(row)}, **rest}] * sizes[name]
              for name, row in published.items()}  # fmt: skip
    scored["Overall"] = scored["GSM8K"] + scored["MATH-500"]
    passes, rest = table({name: (len(problems), summarize(problems, 10)) for name, problems in scored.items()}).split("\n\n")
    for part in (passes, rest):  # aligned, and no wider than a terminal of 120 columns
        lines = part.splitlines()
        assert len({len(line) for line in lines}) == 1 and len({line.count("|") for line in lines}) == 1 and len(lines[0]) <= 120
    cells, others = ([[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines()] for part in (passes, rest))
    assert cells[0] == ["dataset", "problems", *(f"pass@{2**i}" for i in range(6))]
    assert cells[2] == ["GSM8K", "1319", *(f"{v:.2f}" for v in published["GSM8K"])]
    assert cells[3][:3] == ["95 % interval", "", "80.72–80.72"]
    assert cells[6][:2] == ["Overall", "1819"]
    assert [float(cell) for cell in cells[6][2:8]] == pytest.approx(overall, abs=0.0101)
    assert others[0] == ["dataset", "maj@32", "tokens", "cut", "no answer"]
    assert others[6] == ["Overall", "50.00", "100.0", "25.00", "12.50"] and others[7][2] == "100.0–100.0"


def test_labels_come_in_natural_order_and_cannot_break_the_table():
    scored = [{"pass@1": 1.0, "length": 1.0, "cut": 0.0, "no_answer": 0.0}] * 5
    parts = by_label(["Level 10", "Level 2", None, "a|b\x1b[31m", "Level 2"], scored)
    assert {name: len(part) for name, part in parts.items()} == {"Level 2": 2, "Level 10": 1, "a|b\x1b[31m": 1}
    assert list(parts)[:2] == ["Level 2", "Level 10"] and by_label([None, None], scored) == {}
    text = table({name: (len(part), summarize(part, 10)) for name, part in parts.items()}, "level")
    assert "\x1b" not in text and "a/b" in text and text.startswith("| level")
