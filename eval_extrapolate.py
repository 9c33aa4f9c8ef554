"""Perplexity against context length, far beyond the training context.

    python eval_extrapolate.py [RUN ...] [--lengths 256,...,65536] [--stretches 12] [--plot]

Stretches of the longest context, spread evenly over the validation text, are read in windows of length L.
  last    the same targets at every L: the last `train_context` tokens of each stretch, after more context;
  window  all tokens of the stretches, wherever they stand in their windows (the paper's).
Both come from the same forward passes, so a model that ignores context scores the same at every L. A ratio is
the perplexity over that at the training context. Standard errors are over stretches; the ratio's is paired.

Every call computes all lengths and writes RUN/extrapolate.json anew: each stretch's loss, of which checkpoint
and of which text.
torchrun --nproc_per_node=N eval_extrapolate.py shares the windows among N processes.
"""
import argparse
import hashlib
import json
import math
import re
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.lib.stride_tricks import sliding_window_view

import data
from data import die
from model import load_model
from train import autocast, device_name, join_ranks, leave_ranks, print0, ranks
from transport import SCHEMES

TOKENS_AT_ONCE = 16384   # short windows go through the model in batches of this many tokens
PROTOCOLS = ("last", "window")
MOST_LABELS = 8          # in the figure
COLORS = ["C0", "C1", "C2", "C3", "C4", "C5", "C6", "C8", "C9"]   # matplotlib's, without its grey


def parse_lengths(text, train_context, longest):
    """"256,512,...,65536" -> sorted lengths, the training context too; "..." doubles; "": to `longest`."""
    text = text or f"...,{max(longest, train_context)}"
    lengths, doubling = [train_context], False
    for word in text.split(","):
        if word.strip() == "...":
            doubling = True
            continue
        if not word.strip().isdecimal() or int(word) < 1:
            raise ValueError(f"--lengths {text}: expected numbers of at least 1, such as 256,512,...,65536")
        while doubling and 2 * lengths[-1] < int(word):
            lengths.append(2 * lengths[-1])
        lengths.append(int(word))
        doubling = False
    if doubling:
        raise ValueError(f"--lengths {text}: ... must stand before a length")
    return sorted(set(lengths))


def unit(encoding):
    """What a perplexity is per: those of different encodings are different quantities."""
    if encoding == "bytes":
        return "per byte"
    if encoding.startswith("characters"):
        return "per character"
    return f"per token ({encoding})"


# ------------------------------------------------------------------------------------------------------------
# Losses

@torch.no_grad()
def window_nll(model, windows, dtype=torch.float32, tick=None):
    """Windows of token ids (n, L + 1) -> losses (n, L) in nats, float32; ranks share the windows.

    Column t is the loss of token t + 1, given tokens 0 ... t. tick(tokens, L) is called as it goes.
    """
    device = next(model.parameters()).device
    rank, world_size = ranks()
    n, length = len(windows), windows.shape[1] - 1
    nll = torch.zeros(n, length, device=device)
    my_windows, my_nll = windows[rank::world_size], nll[rank::world_size]
    at_once = max(1, TOKENS_AT_ONCE // length)
    for i in range(0, len(my_windows), at_once):
        ids = torch.from_numpy(my_windows[i:i + at_once].astype(np.int64)).to(device)
        with autocast(device, dtype):
            my_nll[i:i + at_once] = model.nll(ids[:, :-1], ids[:, 1:])
        if tick:
            tick(len(ids) * length * n / len(my_windows), length)
    if world_size > 1:
        dist.all_reduce(nll)
    return nll.cpu().numpy()


def stretch_nll(model, stretches, length, **how):
    """Stretches (n, longest + 1), read in windows of `length` -> losses (n, longest).

    Windows end with the stretch; where the length does not divide `longest`, the first one is shorter.
    """
    rest = (stretches.shape[1] - 1) % length
    windows = sliding_window_view(stretches[:, rest:], length + 1, axis=1)[:, ::length]
    nll = window_nll(model, windows.reshape(-1, length + 1), **how)
    nll = nll.reshape(len(stretches), -1)
    if rest:
        first = window_nll(model, stretches[:, :rest + 1], **how)
        nll = np.hstack([first, nll])
    return nll


def finite(value):
    """The value as JSON holds it: None in place of infinity and not-a-number."""
    return json.loads(json.dumps(value), parse_constant=lambda name: None)


def exp(log):
    """e^log, infinite where that is beyond floating point."""
    return math.inf if log > 700 else math.exp(log)


def mean_and_error(values):
    """Mean over stretches and its standard error; one stretch has none."""
    error = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(values.mean()), float(error)


def summary(nll, base):
    """A row, from losses (stretches, tokens) and `base`, those of the same tokens at the training context."""
    stretches = nll.mean(1, dtype=np.float64)
    with np.errstate(invalid="ignore"):                                      # infinite losses
        mean, error = mean_and_error(stretches)
        log_ratio, log_ratio_error = mean_and_error(stretches - base.mean(1, dtype=np.float64))
    return finite({
        "tokens": nll.size,
        "finite": math.isfinite(mean),
        "nll": mean,
        "stderr": error,
        "ppl": exp(mean),
        "log_ratio": log_ratio,
        "log_ratio_stderr": log_ratio_error,
        "ratio": exp(log_ratio) if math.isfinite(log_ratio) else None,
        "stretch_nll": stretches.tolist(),
    })


NO_ROW = dict.fromkeys(summary(np.zeros((1, 1)), np.zeros((1, 1)))) | {"tokens": 0}   # longer than the text


# ------------------------------------------------------------------------------------------------------------
# One run

def peak_mb(device, reset=False):
    """Peak memory since the last reset, in MB: allocated on CUDA, resident on CPU (Linux; None elsewhere)."""
    if device.type == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats(device)
        return round(torch.cuda.max_memory_allocated(device) / 1e6)
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text()
        return round(int(re.search(r"VmHWM:\s+(\d+)", status)[1]) * 1024 / 1e6)
    except (OSError, TypeError):
        return None


class Progress:
    """A line with the part of the work that is done and the time left; jobs are pairs (tokens, length)."""

    def __init__(self, model, label, jobs):
        self.label, self.width = label, model.config.n_embd
        self.done, self.total = 0, sum(self.work(*job) for job in jobs)
        self.start = self.shown = time.time()

    def work(self, n_tokens, length):
        return n_tokens * (12 * self.width + length)                         # a layer's weights, and its keys

    def tick(self, n_tokens, length):
        self.done += self.work(n_tokens, length)
        part = self.done / self.total
        left = data.clock((time.time() - self.start) * (1 / part - 1))
        if ranks()[0] == 0:
            text = f"{self.label}: context {length:,}, {part:.0%}, ETA {left}"
            self.shown = data.progress(self.shown, lambda: text)


def evaluate(run, args):
    """Score one run at every length and write run/extrapolate.json -> what it holds."""
    device, ckpt = torch.device(args.device), run / "ckpt.pt"
    model, saved = load_model(ckpt, device)
    config, encoding = saved["train_config"], saved["encoding"]
    block_size = config["block_size"]
    folder = data.find(args.data or config["data"])
    data.check_encoding(folder, encoding, saved["vocab_size"])
    val = data.load(folder, "val", block_size + 1, saved["vocab_size"])
    lengths = parse_lengths(args.lengths, block_size, 65536 if device.type == "cuda" else 16384)

    # what is scored: stretches of the longest context that the text has, and their last target
    longest = max(length for length in lengths if length < len(val))
    count = min(args.stretches, (len(val) - 1) // longest)
    starts = np.linspace(0, len(val) - 1 - longest, count).astype(int)
    stretches = sliding_window_view(val, longest + 1)[starts]

    result = {
        "run": run.name, "pos": model.config.pos, "params": model.num_params()[0], "seed": config["seed"],
        "iter_num": saved["iter_num"], "train_context": block_size,
        "checkpoint": hashlib.sha256(np.memmap(ckpt, mode="r")).hexdigest(),
        "data": folder.name, "encoding": encoding, "unit": unit(encoding), "val_tokens": len(val),
        "starts": starts.tolist(), "text": hashlib.sha256(stretches).hexdigest(), "dtype": args.dtype,
        "device": f"{ranks()[1]} x {device_name(args.device)}", "torch": torch.__version__, "rows": [],
    }
    print0(f"\n{run.name}: {model.config.pos}, iter {saved['iter_num']:,}, trained at {block_size:,}")
    print0(f"{folder}: {count} stretches of {longest:,} from {len(val):,} tokens; "
           f"perplexity {result['unit']}; {args.dtype} on {result['device']}")

    possible = [length for length in lengths if length <= longest]
    progress = Progress(model, run.name, [(count * longest, length) for length in possible])
    dtype, base = getattr(torch, args.dtype), None
    for length in sorted(lengths, key=lambda n: (n != block_size, n)):       # the ratios' base first
        last = window = NO_ROW
        if length in possible:
            peak_mb(device, reset=True)
            start = time.perf_counter()
            nll = stretch_nll(model, stretches, length, dtype=dtype, tick=progress.tick)
            cost = {"seconds": round(time.perf_counter() - start, 2), "peak_mb": peak_mb(device)}
            base = nll if base is None else base
            last = cost | summary(nll[:, -block_size:], base[:, -block_size:])
            window = cost | summary(nll, base)
        result["rows"].append({"context": length, "protocol": "last"} | last)
        result["rows"].append({"context": length, "protocol": "window"} | window)
        result["rows"].sort(key=lambda row: (row["protocol"], row["context"]))
        if ranks()[0] == 0:
            data.write_json(run / "extrapolate.json", result)                # whole, whenever it is stopped
    return result


# ------------------------------------------------------------------------------------------------------------
# Tables

def by_context(result, protocol):
    """A result's rows under one protocol, by context length."""
    return {row["context"]: row for row in result["rows"] if row["protocol"] == protocol}


def show(row, name, digits):
    """A perplexity (name "nll") in words, or a ratio ("log_ratio") with its standard error."""
    if row[name] is None:
        return "not finite" if row["tokens"] else "-"
    value, error = exp(row[name]), row["log_ratio_stderr"]
    if name == "nll" or error is None or value == math.inf:
        return f"{value:.{digits}f}"
    return f"{value:.{digits}f} ± {value * error:.{digits}f}"


def table(result):
    """Print a run's rows, both protocols side by side."""
    print("  context |       last             ratio |     window             ratio | seconds | peak MB")
    windows = by_context(result, "window")
    for length, last in by_context(result, "last").items():
        if not last["tokens"]:
            print(f"{length:>9,} | longer than the text of {result['val_tokens']:,} tokens")
            continue
        line = f"{length:>9,}"
        for row in (last, windows[length]):
            line += f" | {show(row, 'nll', 3):>10} {show(row, 'log_ratio', 3):>17}"
        print(f"{line} | {last['seconds']:7.1f} | {last['peak_mb'] or '-':>7}")


def compare(results):
    """Ratios by `last`, a line for each run, with its unit and training context: those may differ."""
    print("\nlast: perplexity at the training context, then ratios to it")
    for result in results:
        rows = by_context(result, "last")
        base = result["train_context"]
        ratios = [f"{length:,}: {show(rows[length], 'log_ratio', 2)}" for length in rows if length != base]
        perplexity = f"{show(rows[base], 'nll', 2)} {result['unit']} at {base:,}"
        print(f"{result['run']:<24} {perplexity} | {' | '.join(ratios)}")


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
    """A scheme's look, from SCHEMES: a hue for its family, solid if values are carried, dots with a bias."""
    families = list(dict.fromkeys(re.sub("_qkv?$", "", name) for name in SCHEMES))
    first = pos.split("+")[0]
    family = re.sub("_qkv?$", "", first)
    color = COLORS[families.index(family) % len(COLORS)]
    return {
        "color": {"rope": "black", "nope": "grey"}.get(family, color),
        "linestyle": "-" if SCHEMES[first].values else "--",
        "marker": "o" if "+" in pos else None,
    }


def points(result):
    """Context -> ratio by `last`, where that is a number."""
    rows = by_context(result, "last")
    return {length: row["ratio"] for length, row in rows.items() if row["ratio"]}


def choose(results):
    """-> (runs drawn as curves, runs drawn as one band): at most MOST_LABELS labels.

    Where there are more runs, those with a bias make the band, and the first ones of the others are drawn.
    """
    results = [result for result in results if points(result)]
    if len(results) <= MOST_LABELS:
        return results, []
    band = [result for result in results if SCHEMES[result["pos"].split("+")[-1]].kind == "bias"]
    others = [result for result in results if result not in band]
    return others[:MOST_LABELS - bool(band)], band


def plot(results):
    """Log-log ratio by `last` against context, labels at the lines' ends -> Figure, to show 880 px wide."""
    plt = pyplot()
    plt.rcParams["font.size"] = 10                                           # 13.9 px
    fig, ax = plt.subplots(figsize=(8.8, 5.2), dpi=200)
    curves, band = choose(results)
    ends = []                                                                # (ratio, context, label, color)
    for result in curves:
        line, look = points(result), style(result["pos"])
        ax.plot(list(line), list(line.values()), markersize=4, **look)
        label = result["pos"]
        if sum(other["pos"] == label for other in curves) > 1:
            label = result["run"]
        if len(line) < sum(row["tokens"] > 0 for row in by_context(result, "last").values()):
            label += " (else not finite)"
        ends.append((line[max(line)], max(line), label, look["color"]))
    if band:
        lines = [points(result) for result in band]
        contexts = sorted(set().union(*lines))
        ratios = [[line[context] for line in lines if context in line] for context in contexts]
        low, high = list(map(min, ratios)), list(map(max, ratios))
        ax.fill_between(contexts, low, high, color="C0", alpha=0.4, linewidth=2)
        biases = dict.fromkeys(result["pos"].split("+")[-1] for result in band)
        ends.append((high[-1], contexts[-1], f"any rotation + {' or '.join(biases)}", "C0"))

    for context in {result["train_context"] for result in results}:
        ax.axvline(context, color="grey", linestyle=":")
        top = ax.get_xaxis_transform()
        ax.text(context, 0.98, " training context", color="grey", va="top", transform=top)
    ax.set_xscale("log", base=4)
    ax.set_yscale("log")
    ax.set_xlabel("context length (tokens)")
    ax.set_ylabel("perplexity / perplexity at the training context")
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.yaxis.set_major_locator(plt.LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_locator(plt.NullLocator())
    ax.grid(alpha=0.3)

    units = " and ".join(sorted({result["unit"] for result in results}))
    note = f"solid: values are carried too; dashed: queries and keys alone; perplexity {units}"
    left_out = [result["run"] for result in results if result not in curves + band]
    if left_out:
        note += f"\nnot drawn (at most {MOST_LABELS} labels): {', '.join(left_out)}"
    fig.text(0.01, 0.01, note, color="grey", wrap=True)

    # labels stand beside the axes, as high as their lines end, or as the labels below need
    widest = max((len(label) for _, _, label, _ in ends), default=0)
    fig.subplots_adjust(left=0.08, right=0.95 - 0.0085 * widest, bottom=0.18, top=0.98)
    height = -1
    for ratio, context, label, color in sorted(ends):
        _, end = ax.transAxes.inverted().transform(ax.transData.transform((context, ratio)))
        height = max(end, height + 0.05)
        arrow = {"arrowstyle": "-", "color": color, "linewidth": 0.7, "relpos": (0, 0.5)}
        ax.annotate(label, (context, ratio), (1.03, height), textcoords=ax.transAxes, va="center",
                    color=color, arrowprops=arrow)
    return fig


# ------------------------------------------------------------------------------------------------------------

def check_runs(runs):
    """Raise ValueError, before any work, if a run has no checkpoint."""
    for run in runs:
        if not (run / "ckpt.pt").is_file():
            raise ValueError(f"no run at {run}: {run / 'ckpt.pt'} does not exist")


def parse_args(argv):
    parser = data.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("runs", nargs="*", metavar="RUN", type=Path, help="folders with a ckpt.pt (all under out/)")
    option("--lengths", default="", help="context lengths, such as 256,512,...,65536, where ... doubles "
           "(the training context, doubled up to 16,384, on CUDA 65,536)")
    option("--stretches", type=int, default=8, help="pieces of text to score, of the longest context (8)")
    option("--data", default="", help="data set (default: the one the run was trained on)")
    option("--device", default="auto", help="cpu, cuda, cuda:1, ...")
    option("--dtype", default="float32", choices=("float32", "bfloat16"), help="float32, on any device")
    option("--plot", action="store_true", help="draw out/extrapolation.png (needs matplotlib)")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    results = []
    try:
        runs = args.runs or sorted(path.parent for path in Path("out").glob("*/ckpt.pt"))
        if not runs:
            raise ValueError("no run under out/: train one with python train.py, or name its folder")
        if args.stretches < 1:
            raise ValueError("--stretches must be at least 1")
        check_runs(runs)
        if args.plot:
            pyplot()                                                         # before the work, not after it
        args.device, rank, _ = join_ranks(args.device)
        for run in runs:
            results.append(evaluate(run, args))
            if rank == 0:
                table(results[-1])
        if rank == 0 and len(results) > 1:
            compare(results)
        if rank == 0 and args.plot:
            path = Path("out", "extrapolation.png")
            path.parent.mkdir(exist_ok=True)
            plot(results).savefig(path)
            print(f"\n{path}")
    except (ValueError, OSError) as error:
        die(error)
    rows = [(result["run"], row) for result in results for row in result["rows"]]
    bad = [f"{run} at {row['context']:,}" for run, row in rows if row["finite"] is False]
    if bad:
        print0(f"error: the loss is not finite: {', '.join(dict.fromkeys(bad))}", file=sys.stderr)
    leave_ranks(1 if bad else 0)
    if bad:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
