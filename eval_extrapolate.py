"""Perplexity against context length, far beyond the training context.

    python eval_extrapolate.py [RUN ...] [--lengths 256,...,65536] [--stretches 12] [--copy] [--plot]

Stretches of the longest context, spread evenly over the validation text, are read in windows of length L.
  last    the same targets at every L: the last `train_context` tokens of each stretch, after more context;
  window  all tokens of the stretches, wherever they stand in their windows (the paper's).
Both come from the same forward passes, so a model that ignores context scores the same at every L. A ratio is
the perplexity over that at the training context. Standard errors are over stretches; the ratio's is paired.
  copy    with --copy: the last `train_context` / 4 tokens of each stretch, when they are also the first of
          their L tokens of context; the ratio is over the perplexity of the same targets without that copy.
Every call writes RUN/extrapolate.json anew. Under torchrun, ranks share the stretches.
"""
import argparse
import hashlib
import json
import math
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import data
from model import load_model
from train import autocast, device_name, join_ranks, leave_ranks, pick_dtype, print0, ranks
from transport import SCHEMES, LogLength, parse

TOKENS_AT_ONCE = 16384   # short windows go through the model in batches of this many tokens
MOST_LABELS = 9          # in the figure
LABEL_GAP = 0.05         # between labels, of the height of the axes
COLORS = "grey black C0 C1 C2 C3 C4 C5 C6 C8 navy teal olive maroon".split()   # nope, rope, other families


def parse_lengths(text, train_context, longest):
    """"256,512,...,65536" -> sorted lengths, the training context too; "..." doubles; "": to `longest`."""
    text = text or f"...,{max(longest, train_context)}"
    number = r"(\.\.\.,)?[1-9]\d*"
    if not re.fullmatch(f"{number}(,{number})*", text):
        raise ValueError(f"--lengths {text}: expected numbers of at least 1, such as 256,512,...,65536")
    lengths = [train_context]
    for dots, digits in re.findall(r"(\.\.\.,)?(\d+)", text):
        length = int(digits)
        while dots and 2 * lengths[-1] < length:
            lengths.append(2 * lengths[-1])
        lengths.append(length)
    return sorted(set(lengths))


# ------------------------------------------------------------------------------------------------------------
# Losses

@torch.no_grad()
def stretch_nll(model, stretch, length):
    """A stretch of n + 1 token ids, read in windows of `length` -> losses (n,) in nats.

    Windows end with the stretch; where the length does not divide n, the first one is shorter.
    """
    device = next(model.parameters()).device
    ids = torch.from_numpy(stretch.astype(np.int64)).to(device)
    rest = (len(ids) - 1) % length
    windows = ids[rest:].unfold(0, length + 1, length)       # a window's last target starts the next one
    batches = list(windows.split(max(1, TOKENS_AT_ONCE // length)))
    if rest:
        batches.insert(0, ids[None, :rest + 1])
    return torch.cat([model.nll(batch[:, :-1], batch[:, 1:]).flatten() for batch in batches])


def all_nll(model, stretches, length, progress):
    """Stretches (n, longest + 1) -> losses (n, longest), NaN where not finite; ranks share the stretches."""
    rank, world_size = ranks()
    nll = torch.zeros(len(stretches), stretches.shape[1] - 1)
    for i in range(rank, len(stretches), world_size):
        nll[i] = stretch_nll(model, stretches[i], length)
        progress.tick(nll.shape[1], length)
    if world_size > 1:
        dist.all_reduce(nll)
    return torch.where(nll.isfinite(), nll, math.nan).numpy()


def with_copy(stretches, length, passage):
    """The last `length` + 1 tokens of stretches (n, longest + 1), their last `passage` at the start, too."""
    windows = stretches[:, -length - 1:].copy()
    windows[:, :passage] = stretches[:, -passage:]
    return windows


def for_json(value):
    """The value as JSON holds it: None in place of infinity and not-a-number."""
    return json.loads(json.dumps(value), parse_constant=lambda name: None)


def mean_and_error(values):
    """Mean of (stretches,) or (seeds, stretches), and its standard error over both; NaN over one of each."""
    variances = []
    for axis, count in enumerate(values.shape):
        if count > 1:
            others = tuple(other for other in range(values.ndim) if other != axis)
            variances.append(values.mean(others).var(ddof=1) / count)
    return float(values.mean()), math.sqrt(sum(variances)) if variances else math.nan


def summary(nll, base):
    """A row, from losses (stretches, tokens) and `base`, those of the same tokens that the ratio is over."""
    stretches = nll.mean(1, dtype=np.float64)
    mean, error = mean_and_error(stretches)
    log_ratio, log_ratio_error = mean_and_error(stretches - base.mean(1, dtype=np.float64))
    with np.errstate(over="ignore"):
        ppl, ratio = np.exp([mean, log_ratio]).tolist()
    return for_json({
        "tokens": nll.size,
        "finite": math.isfinite(ppl),
        "nll": mean,
        "stderr": error,
        "ppl": ppl,
        "ratio": ratio,
        "ratio_stderr": ratio * log_ratio_error,
        "stretch_nll": stretches.tolist(),
    })


# ------------------------------------------------------------------------------------------------------------
# One run

class Progress:
    """A line with the part of the work that is done and the time left; jobs are pairs (tokens, length)."""

    def __init__(self, model, label, jobs):
        self.label, self.width, self.done = label, model.config.n_embd, 0
        self.total = sum(self.work(*job) for job in jobs)
        self.start = self.shown = time.time()

    def work(self, n_tokens, length):
        return n_tokens * (12 * self.width + length)         # a layer's weights, and its keys

    def tick(self, n_tokens, length):
        self.done += self.work(n_tokens, length)
        part = self.done / self.total
        left = data.clock((time.time() - self.start) * (1 / part - 1))
        text = f"{self.label}: context {length:,}, {part:.0%}, ETA {left}"
        if ranks()[0] == 0:
            self.shown = data.progress(self.shown, text)


def add_logn(model, train_context):
    """Make a model that of the scheme +logn, with the same weights. ValueError if it has a scale already."""
    if parse(model.config.pos)[2]:
        raise ValueError(f"--logn: {model.config.pos} scales its logits already")
    config = replace(model.config, pos=f"{model.config.pos}+logn", train_context=max(2, train_context))
    model.config, model.transport.scale = config, LogLength(config)


def load_run(run, device, logn=False, longest=0, name=None):
    """A run's model, validation text of at least `longest` tokens, and what every result tells of it.

    The text is that of the run, or of another data set, by name. Raises ValueError or OSError where the
    checkpoint or the text is missing, too short, or does not fit the other.
    """
    model, saved = load_model(run / "ckpt.pt", device)
    train_context, encoding = saved["train_config"]["block_size"], saved["encoding"]
    if logn:
        add_logn(model, train_context)
    folder = data.find(name or saved["train_config"]["data"])
    data.check_encoding(folder, encoding)
    val = data.load(folder, "val", 1 + max(longest, train_context), model.config.vocab_size)
    return model, val, {
        "run": run.resolve().name + "+logn" * logn,
        "pos": model.config.pos,
        "iter_num": saved["iter_num"],
        "train_context": train_context,
        "data": folder.resolve().name,
        "unit": "per byte" if encoding == "bytes" else f"per token ({encoding})",
    }


def spread_evenly(tokens, n, length):
    """n stretches of `length` + 1 tokens, fewer where they would overlap: (n, length + 1)."""
    last = len(tokens) - 1 - length
    starts = np.linspace(0, last, min(n, 1 + last // length)).astype(int)
    return np.stack([tokens[start:start + length + 1] for start in starts])


def evaluate(run, args):
    """Score one run at every length -> what run/extrapolate.json is to hold."""
    model, val, about = load_run(run, args.device, args.logn, name=args.data)
    block_size = about["train_context"]
    wanted = parse_lengths(args.lengths, block_size, 65536 if "cuda" in args.device else 16384)
    lengths = [length for length in wanted if length < len(val)]
    longest = lengths[-1]
    stretches = spread_evenly(val, args.stretches, longest)
    rank, world_size = ranks()
    result = about | {
        "checkpoint": hashlib.sha256((run / "ckpt.pt").read_bytes()).hexdigest(),
        "stretches": len(stretches),
        "longest": longest,
        "text": hashlib.sha256(stretches).hexdigest(),
        "device": f"{world_size} x {device_name(args.device)}, torch {torch.__version__}",
        "dtype": str(args.dtype)[6:],
        "rows": [],
    }
    print0(f"\n{result['run']}: iter {result['iter_num']:,}, trained at {block_size:,}; "
           f"{len(stretches)} stretches of {longest:,} from {result['data']}; "
           f"perplexity {result['unit']}; {result['dtype']} on {result['device']}")
    if wanted != lengths:
        print0(f"left out: what is longer than the text of {len(val):,} tokens")

    passage = block_size // 4
    copies = [length for length in lengths if args.copy and length >= 2 * passage > 0]
    jobs = [(longest, length) for length in lengths] + [(length, length) for length in copies]
    progress = Progress(model, run.name, jobs * len(range(rank, len(stretches), world_size)))
    with autocast(args.device, args.dtype):
        nll = {length: all_nll(model, stretches, length, progress) for length in lengths}
        copied = [
            all_nll(model, with_copy(stretches, length, passage), length, progress) for length in copies
        ]

    for protocol, targets in (("last", block_size), ("window", longest)):
        for length in lengths:
            row = summary(nll[length][:, -targets:], nll[block_size][:, -targets:])
            result["rows"].append({"context": length, "protocol": protocol} | row)
    for length, losses in zip(copies, copied):
        row = summary(losses[:, -passage:], nll[length][:, -passage:])
        result["rows"].append({"context": length, "protocol": "copy"} | row)
    return result


def cell(value, error=None, digits=3):
    """A number of a table, with its standard error where it has one."""
    if value is None:
        return "not finite"
    text = f"{value:.{digits}f}"
    return text if error is None else f"{text} ± {error:.{digits}f}"


def table(result):
    print0("protocol   context |  perplexity              ratio")
    for row in result["rows"]:
        ratio = cell(row["ratio"], row["ratio_stderr"])
        print0(f"{row['protocol']:<8} {row['context']:>9,} | {cell(row['ppl']):>11} {ratio:>18}")


# ------------------------------------------------------------------------------------------------------------
# Figure

def pyplot():
    """matplotlib is optional. Raises ValueError with the pip command where it is missing."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib")
    return matplotlib.pyplot


def style(pos):
    """A scheme's look, from SCHEMES: a hue for its family, solid if values are carried, dots for a "+"."""
    first = pos.split("+")[0]
    families = list(dict.fromkeys(name.split("_")[0] for name in SCHEMES))   # accum for accum_qk, accum_qkv
    return {
        "color": COLORS[families.index(first.split("_")[0]) % len(COLORS)],
        "linestyle": "-" if SCHEMES[first].values else "--",
        "marker": "." if "+" in pos else None,
    }


def label_ends(ax, ends):
    """Write labels beside the axes, as high as their lines end, or as their neighbours need.

    ends: (label, value at the line's end, color) each. Limits and scales of the axes must be set before.
    """
    to_axes = ax.transData + ax.transAxes.inverted()
    height, labels = -math.inf, []
    for label, value, color in sorted(ends, key=lambda end: end[1]):
        height = max(to_axes.transform((1, value))[1], height + LABEL_GAP)
        labels.append((label, color, height))

    height = math.inf
    for label, color, wanted in reversed(labels):
        height = min(wanted, height - LABEL_GAP, 1)
        ax.text(1.01, height, label, color=color, va="center", transform=ax.transAxes, parse_math=False)


def plot(results):
    """Log-log ratio by `last` against context, labels at the lines' ends -> Figure, to show 880 px wide.

    Where there are too many runs for a label each, those with a bias share one, and the last ones are left
    out. All perplexities have the unit of the first.
    """
    plt = pyplot()
    plt.rcParams["font.size"] = 10                           # 13.9 px
    fig, ax = plt.subplots(figsize=(8.8, 5.2), dpi=200)
    biases = {parse(result["pos"])[1] for result in results} - {None}
    biased = "any rotation + " + " or ".join(sorted(biases))
    ends = {}                                                # label -> ratio where the line ends, color
    for result in sorted(results, key=lambda result: parse(result["pos"])[1] is None):
        last = [row for row in result["rows"] if row["protocol"] == "last" and row["ratio"]]
        contexts, ratios = [row["context"] for row in last], [row["ratio"] for row in last]
        label, look = result["run"], style(result["pos"])
        if len(results) > MOST_LABELS and parse(result["pos"])[1]:
            label, look = biased, {"color": "C9", "linewidth": 4}
        if last and (label in ends or len(ends) < MOST_LABELS):
            ax.plot(contexts, ratios, **look)
            ends[label] = ratios[-1], look["color"]
    for context in {result["train_context"] for result in results}:
        ax.axvline(context, color="grey", linestyle=":")
    ax.set_xscale("log", base=4)
    ax.set_yscale("log", base=2)
    ax.set_xlabel("context in tokens (dotted: in training);   solid: values are carried,   dots: with a +")
    ax.set_ylabel(f"perplexity {results[0]['unit']} / that at the training context")
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.grid(alpha=0.3)

    label_ends(ax, [(label, ratio, color) for label, (ratio, color) in ends.items()])
    fig.tight_layout()
    return fig


def save_figure(figure, path):
    """Write a figure as PNG, whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    with data.written_whole(path, "wb") as file:
        figure.savefig(file, format="png")
    print(f"\n{path}")


# ------------------------------------------------------------------------------------------------------------

def parse_args(argv):
    parser = data.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("runs", nargs="*", metavar="RUN", type=Path, help="folders with a ckpt.pt (all under out/)")
    option("--lengths", help="context lengths, such as 256,512,...,65536, where ... doubles "
           "(the training context, doubled up to 16,384, on CUDA 65,536)")
    option("--stretches", type=int, default=8, help="pieces of text to score, of the longest context (8)")
    option("--data", help="data set (default: the one the run was trained on)")
    option("--copy", action="store_true", help="score repeated passages too")
    option("--logn", action="store_true", help="scale logits by max(1, ln i / ln of the training context)")
    option("--device", default="auto", help="cpu, cuda, cuda:1, ...")
    option("--dtype", default="float32", help="float32, or bfloat16 (autocast), or auto: where that is fast")
    option("--plot", action="store_true", help="draw out/extrapolation.png (needs matplotlib)")
    args = parser.parse_args(argv)
    args.runs = args.runs or sorted(path.parent for path in Path("out").glob("*/ckpt.pt"))
    if not args.runs:
        raise ValueError("no run under out/: train one with python train.py, or name its folder")
    if args.stretches < 1:
        raise ValueError("--stretches must be at least 1")
    return args


def check(args):
    """Raise ValueError or OSError for a run that cannot be loaded, or not be drawn beside the others."""
    units = {load_run(run, "cpu", args.logn, name=args.data)[2]["unit"] for run in args.runs}
    if args.plot and len(units) > 1:
        raise ValueError(f"--plot: perplexities {' and '.join(sorted(units))} cannot share a figure: "
                         "name other runs")


def main(argv=None):
    """-> exit status: 1 if a perplexity is not finite."""
    results = []
    with data.one_line_errors():
        args = parse_args(argv)
        if len(args.runs) > 1:                               # a single one is loaded first in any case
            check(args)
        if args.plot:
            pyplot()                                         # before the work, not after it
        args.device = join_ranks(args.device)
        args.dtype = pick_dtype(args.dtype, args.device)
        for run in args.runs:
            results.append(evaluate(run, args))
            table(results[-1])                               # first, since the folder may be read-only
            if ranks()[0] == 0:
                data.write_json(run / "extrapolate.json", results[-1])
        if args.plot and ranks()[0] == 0:
            save_figure(plot(results), Path("out/extrapolation.png"))
    bad = [result["run"] for result in results if not all(row["finite"] for row in result["rows"])]
    if bad:
        print0(f"error: perplexity is not finite: {', '.join(bad)}", file=sys.stderr)
    status = 1 if bad else 0
    leave_ranks(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
