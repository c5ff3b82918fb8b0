"""What samples say about a model: pass@k, majority votes, intervals, and the table that shows them.

Owns every figure of an evaluation and how sure it is. Knows nothing of models, tokens, files or processes; numpy alone.

A record is one graded sample: {"correct": bool, "reason": the grader's, "answer": text or None, "tokens": int,
"finish_reason": "stop" or "length"}. Every figure is a mean over problems of one number a problem, so that one
bootstrap over problems gives the interval of them all.
"""

import math
import re
from collections import Counter

import numpy

import grader
from console import UserError, printable


def pass_at_k(samples, correct, k):
    """Chance that one of k samples is right, unbiased, from `correct` of `samples` (Chen et al. 2021, eq. 1)."""
    if not 1 <= k <= samples:
        raise UserError(f"pass@{k}: k must lie in 1..{samples}, the samples a problem")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def majority_at_k(records, k):
    """Chance that the most frequent answer of k samples is right: mean over disjoint runs of k samples; ties share.

    Right answers are one class; wrong ones are told apart by their spelling; a sample without an answer has no vote.
    """
    wins = []
    for run in (records[i : i + k] for i in range(0, len(records) - k + 1, k)):
        votes = Counter(True if r["correct"] else _spelling(r["answer"]) for r in run if r["answer"])
        leaders = [answer for answer, count in votes.items() if count == max(votes.values())]
        wins.append(leaders.count(True) / len(leaders) if leaders else 0.0)
    return sum(wins) / len(wins)


def _spelling(answer):
    return "".join(grader.clean(answer[:999]).split())  # what is longer than this is no answer that repeats


def scores(records, voting=True):
    """The figures of one problem from its samples' records -> {"pass@1", ..., "maj@2", ..., "length", "cut", ...}.

    length is in tokens; cut and no_answer are shares of the samples that hit a length limit and that hold no answer.
    """
    n, right = len(records), sum(r["correct"] for r in records)
    powers = [2**i for i in range(n.bit_length())]
    return {
        **{f"pass@{k}": pass_at_k(n, right, k) for k in powers},
        **{f"maj@{k}": majority_at_k(records, k) for k in powers[1:] if voting},
        "length": sum(r["tokens"] for r in records) / n,
        "cut": sum(r["finish_reason"] == "length" for r in records) / n,
        "no_answer": sum(r["reason"] == "no answer" for r in records) / n,
    }


def summarize(problems, resamples=2000):
    """[scores of each problem] -> {figure: (mean, low, high)}: a seeded 95 % percentile bootstrap over the problems."""
    n, names = len(problems), list(problems[0])
    values = numpy.array([[problem[name] for name in names] for problem in problems])  # (N, figures)
    drawn = numpy.random.default_rng(0).multinomial(n, [1 / n] * n, size=resamples)  # (resamples, N): how often each
    low, high = numpy.percentile(drawn @ values / n, [2.5, 97.5], axis=0)
    return dict(zip(names, zip(values.mean(0).tolist(), low.tolist(), high.tolist())))


def by_label(labels, scored):
    """The scores of problems that share a label, by label: {"Level 1": [...], "Level 2": [...]}. None: no label."""

    def natural(label):
        return [part.zfill(9) if part.isdigit() else part for part in re.split(r"(\d+)", label)]

    found = sorted(set(labels) - {None}, key=natural)
    return {label: [s for s, own in zip(scored, labels) if own == label] for label in found}


def table(rows, heading="dataset"):
    """{name: (number of problems, {figure: (mean, low, high)})} -> two aligned Markdown tables, shares in percent.

    The first holds pass@k, the second the rest; below each name stands the 95 % interval of its figures.
    """
    names = list(next(iter(rows.values()))[1])
    passes = [name for name in names if name.startswith("pass@")]
    votes = [name for name in names if name.startswith("maj@")][-1:]  # those of fewer samples are in results.json
    first = [[heading, "problems", *passes]]
    second = [[heading, *votes, "tokens", "cut", "no answer"]]
    for title, (n, figures) in rows.items():
        title = printable(title).replace("|", "/")
        for name, count, pick in ((title, str(n), _mean), ("95 % interval", "", _span)):
            first.append([name, count, *(pick(figures[name]) for name in passes)])
            second.append([name, *(pick(figures[name]) for name in votes), pick(figures["length"], 1, 1),
                           pick(figures["cut"]), pick(figures["no_answer"])])  # fmt: skip
    return f"{_aligned(first)}\n\n{_aligned(second)}"


def _mean(figure, scale=100, digits=2):
    return f"{scale * figure[0]:.{digits}f}"


def _span(figure, scale=100, digits=2):
    return f"{scale * figure[1]:.{digits}f}–{scale * figure[2]:.{digits}f}"


def _aligned(cells):
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = []
    for row in cells:
        padded = [cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths))]
        lines.append(f"| {' | '.join(padded)} |")
    rule = "|" + "|".join("-" * (width + 1) + ("-" if i == 0 else ":") for i, width in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])
