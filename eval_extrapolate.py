"""Perplexity against context length, far beyond the training context:  python eval_extrapolate.py [RUN ...] [--plot]

Stretches of the longest context, spread evenly over the validation text, are read in windows of every length L.
  last    the same target tokens at every L: the end of each stretch, `train_context` tokens, after more and more context;
  window  all tokens of the stretches, whatever their place in their window (the paper's).
Both come from the same forward passes, so a model that ignores context scores the same at every L. The ratio is the
perplexity over that at the training context. Errors are over stretches; the ratio's is that of its logarithm, paired.

Every call computes all lengths and writes RUN/extrapolate.json anew: the stretches' losses, and what they belong to.
torchrun --nproc_per_node=N eval_extrapolate.py shares the windows among N processes.
"""
import argparse
import hashlib
import math
import re
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

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
    """"256,512,...,65536" -> sorted lengths, the training context among them; "..." doubles; default: up to `longest`."""
    text = text or f"...,{max(longest, train_context)}"
    lengths, doubling = [train_context], False
    for word in text.split(","):
        if word.strip() == "...":
            doubling = True
            continue
        if not word.strip().isdecimal() or int(word) < 1:
            raise ValueError(f"--lengths {text}: expected numbers from 1 on with commas, such as 256,512,...,65536")
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


# ---------------------------------------------------------------------------------------------------------------------
# Losses

@torch.no_grad()
def window_nll(model, windows, dtype=torch.float32, tick=None):
    """Losses of windows of token ids (n, L + 1) -> (n, L) nats, float32. Ranks share the windows; tick(tokens, L) as it goes.

    Column t is the loss of token t + 1 given tokens 0 ... t.
    """
    device = next(model.parameters()).device
    rank, world_size = ranks()
    n, length = len(windows), windows.shape[1] - 1
    nll = torch.zeros(n, length, device=device)
    mine, my_nll = windows[rank::world_size], nll[rank::world_size]
    at_once = max(1, TOKENS_AT_ONCE // length)
    for i in range(0, len(mine), at_once):
        ids = torch.from_numpy(mine[i:i + at_once].astype(np.int64)).to(device)
        with autocast(device, dtype):
            my_nll[i:i + at_once] = model.nll(ids[:, :-1], ids[:, 1:])
        if tick:
            tick(len(ids) * length * n / len(mine), length)
    if world_size > 1:
        dist.all_reduce(nll)
    return nll.cpu().numpy()


def stretch_nll(model, stretches, length, **how):
    """Losses of stretches (n, longest + 1), read in windows of `length` -> (n, longest).

    Windows end with the stretch; where the length does not divide `longest`, the first one is shorter.
    """
    n, rest = len(stretches), (stretches.shape[1] - 1) % length
    windows = np.lib.stride_tricks.sliding_window_view(stretches[:, rest:], length + 1, axis=1)[:, ::length]
    nll = window_nll(model, windows.reshape(-1, length + 1), **how).reshape(n, -1)
    if rest:
        nll = np.hstack([window_nll(model, stretches[:, :rest + 1], **how), nll])
    return nll


def finite(value):
    """The value for JSON: null in place of infinity and not-a-number."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def exp(log):
    """e^log, infinite where that is beyond floating point."""
    return math.exp(log) if not log > 700 else math.inf


def mean_and_error(values):
    """Mean over stretches and its standard error; there is none with one stretch."""
    error = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(values.mean()), float(error)


def summary(nll, base):
    """A row: losses (stretches, tokens), averaged in float64; base are the same tokens' at the training context."""
    stretches = nll.mean(1, dtype=np.float64)
    with np.errstate(invalid="ignore"):                                      # infinite losses
        mean, error = mean_and_error(stretches)
        log_ratio, ratio_error = mean_and_error(stretches - base.mean(1, dtype=np.float64))
    return finite({
        "tokens": nll.size,
        "finite": math.isfinite(mean),
        "nll": mean,
        "stderr": error,
        "ppl": exp(mean),
        "log_ratio": log_ratio,
        "ratio_stderr": ratio_error,
        "ratio": exp(log_ratio) if math.isfinite(log_ratio) else None,
        "stretch_nll": stretches.tolist(),
    })


NO_ROW = {"tokens": 0, "finite": None, "nll": None, "ppl": None, "log_ratio": None, "ratio": None}   # text too short


# ---------------------------------------------------------------------------------------------------------------------
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
    """A line with the part of the work that is done and the time left. jobs: (tokens, context length) each."""

    def __init__(self, model, label, jobs):
        self.label, self.width = label, model.config.n_embd
        self.done, self.total = 0, sum(self.work(*job) for job in jobs)
        self.start = self.shown = time.time()

    def work(self, n_tokens, length):
        return n_tokens * (12 * self.width + length)                         # a layer's weights, and its keys

    def tick(self, n_tokens, length):
        self.done += self.work(n_tokens, length)
        left = (time.time() - self.start) * (self.total / self.done - 1)
        line = f"{self.label}: context {length:,}, {self.done / self.total:.0%}, ETA {data.clock(left)}"
        if ranks()[0] == 0:
            self.shown = data.progress(self.shown, lambda: line)


def evaluate(run, args):
    """Score one run at every length and write run/extrapolate.json -> what it holds."""
    device, ckpt = torch.device(args.device), run / "ckpt.pt"
    model, saved = load_model(ckpt, device)
    config, encoding = saved["train_config"], saved["encoding"]
    block_size = config["block_size"]
    folder = data.find(args.data or config["data"])
    data.check_encoding(folder, encoding)
    val = data.load(folder, "val", block_size + 1, model.config.vocab_size)
    lengths = parse_lengths(args.lengths, block_size, 65536 if device.type == "cuda" else 16384)
    possible = [length for length in lengths if length < len(val)]
    longest = max(possible)
    count = min(args.stretches, (len(val) - 1) // longest)
    starts = np.linspace(0, len(val) - 1 - longest, count).astype(int)
    stretches = np.stack([val[start:start + longest + 1] for start in starts])

    result = {
        "run": run.name, "pos": model.config.pos, "seed": config["seed"], "train_context": block_size,
        "iter_num": saved["iter_num"], "checkpoint": hashlib.sha256(np.memmap(ckpt, mode="r")).hexdigest(),
        "data": folder.name, "encoding": encoding, "unit": unit(encoding), "val_tokens": len(val),
        "starts": starts.tolist(), "text": hashlib.sha256(stretches).hexdigest(), "dtype": args.dtype,
        "device": f"{ranks()[1]} x {device_name(device)}", "torch": torch.__version__,
        "rows": [{"context": n, "protocol": p} | NO_ROW for n in lengths for p in PROTOCOLS if n > longest],
    }
    print0(f"\n{run.name}: {model.config.pos}, iter {saved['iter_num']:,}, trained at {block_size:,}\n"
           f"{folder}: {count} x {longest:,} of {len(val):,} tokens; perplexity {unit(encoding)}; "
           f"{args.dtype} on {result['device']}", flush=True)

    progress = Progress(model, run.name, [(count * longest, length) for length in possible])
    how = {"dtype": getattr(torch, args.dtype), "tick": progress.tick}
    base = None
    for length in sorted(possible, key=lambda n: (n != block_size, n)):      # the ratios' base first
        peak_mb(device, reset=True)
        start = time.perf_counter()
        nll = stretch_nll(model, stretches, length, **how)
        row = {"context": length, "seconds": round(time.perf_counter() - start, 2), "peak_mb": peak_mb(device)}
        base = nll if base is None else base
        last = summary(nll[:, -block_size:], base[:, -block_size:])
        result["rows"].append({"protocol": "last"} | row | last)
        result["rows"].append({"protocol": "window"} | row | summary(nll, base))
        if ranks()[0] == 0:
            data.write_json(run / "extrapolate.json", result)                # whole, whenever it is stopped
    return result


# ---------------------------------------------------------------------------------------------------------------------
# Tables

def by_context(result, protocol):
    """A result's rows under one protocol: context length -> row, sorted."""
    rows = {row["context"]: row for row in result["rows"] if row["protocol"] == protocol}
    return dict(sorted(rows.items()))


def show(row, name, digits):
    """A perplexity (name "nll") or a ratio ("log_ratio") in words."""
    if row[name] is None:
        return "not finite" if row["tokens"] else "-"
    return f"{exp(row[name]):.{digits}f}"


def table(result):
    """Print one run's rows, both protocols side by side."""
    print("  context |       last      ratio     +- |     window      ratio     +- | seconds | peak MB")
    windows = by_context(result, "window")
    for length, last in by_context(result, "last").items():
        if not last["tokens"]:
            print(f"{length:>9,} | longer than the text, {result['val_tokens']:,} tokens")
            continue
        line = f"{length:>9,}"
        for row in (last, windows[length]):
            error = "-" if row["ratio_stderr"] is None else f"{row['ratio_stderr']:.3f}"
            line += f" | {show(row, 'nll', 3):>10} {show(row, 'log_ratio', 3):>10} {error:>6}"
        print(f"{line} | {last['seconds']:7.1f} | {last['peak_mb'] or '-':>7}")


def compare(results):
    """Print the ratios by `last` in Markdown, one table for each text, since others are other quantities."""
    for text in dict.fromkeys(result["text"] for result in results):
        group = [result for result in results if result["text"] == text]
        lengths = sorted({row["context"] for result in group for row in result["rows"]})
        titles = ["run", "trained at", f"ppl there, {group[0]['unit']}", *(f"x at {n:,}" for n in lengths)]
        print(f"\n{group[0]['data']}, `last`:\n\n|", " | ".join(titles), "|\n" + "|---" * len(titles) + "|")
        for result in group:
            rows = by_context(result, "last")
            base = result["train_context"]
            cells = [show(rows[n], "log_ratio", 2) if n in rows else "" for n in lengths]
            print(f"| {result['run']} | {base:,} | {show(rows[base], 'nll', 2)} |", " | ".join(cells), "|")


# ---------------------------------------------------------------------------------------------------------------------
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
    """A scheme's look, from the rows of SCHEMES: a hue for each family, solid where values are carried, a marker for a bias."""
    families = list(dict.fromkeys(re.sub("_qkv?$", "", name) for name in SCHEMES))
    first, *bias = pos.split("+")
    family = re.sub("_qkv?$", "", first)
    color = COLORS[families.index(family) % len(COLORS)]
    return {
        "color": {"rope": "black", "nope": "grey"}.get(family, color),
        "linestyle": "-" if SCHEMES[first].values else "--",
        "marker": "os^Dv"[families.index(bias[0]) % 5] if bias else None,
    }


def points(result):
    """Contexts, and ratios there by `last`, where they are numbers."""
    rows = [row for row in by_context(result, "last").values() if row["ratio"]]
    return [row["context"] for row in rows], [row["ratio"] for row in rows]


def choose(results):
    """-> (runs drawn as curves, runs drawn as one band): at most MOST_LABELS labels.

    Of more runs, those with a bias make the band, and the first ones of the others are drawn.
    """
    drawable = [result for result in results if points(result)[0]]
    if len(drawable) <= MOST_LABELS:
        return drawable, []
    band = [r for r in drawable if any(SCHEMES[name].kind == "bias" for name in r["pos"].split("+"))]
    others = [r for r in drawable if r not in band]
    return others[:MOST_LABELS - bool(band)], band


def plot(results):
    """Log-log ratio by `last` against context length, a label at each line's end -> Figure, to be shown 880 px wide."""
    plt = pyplot()
    plt.rcParams["font.size"] = 10                                           # 13.9 px
    fig, ax = plt.subplots(figsize=(8.8, 5.2), dpi=200)
    curves, band = choose(results)
    schemes = [result["pos"] for result in curves]
    ends = []                                                                # (ratio, context, label, color)
    for result in curves:
        contexts, ratios = points(result)
        label = result["pos"] if schemes.count(result["pos"]) == 1 else result["run"]
        if None in [row["log_ratio"] for row in result["rows"] if row["tokens"]]:
            label += " (else not finite)"
        look = style(result["pos"])
        ax.plot(contexts, ratios, markersize=4, **look)
        ends.append((ratios[-1], contexts[-1], label, look["color"]))
    if band:
        lines = [dict(zip(*points(result))) for result in band]
        contexts = sorted(set.intersection(*map(set, lines)))
        low = [min(line[n] for line in lines) for n in contexts]
        high = [max(line[n] for line in lines) for n in contexts]
        ax.fill_between(contexts, low, high, color="C0", alpha=0.4, linewidth=2)
        biases = dict.fromkeys(result["pos"].split("+")[-1] for result in band)
        ends.append((high[-1], contexts[-1], f"any rotation + {' or '.join(biases)}", "C0"))

    for context in {result["train_context"] for result in results}:
        ax.axvline(context, color="grey", linestyle=":")
        ax.text(context, 0.98, " training context", color="grey", va="top", transform=ax.get_xaxis_transform())
    ax.set_xscale("log", base=4)
    ax.set(yscale="log", xlabel="context length (tokens)", ylabel="perplexity / perplexity at the training context")
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.yaxis.set_major_locator(plt.LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_locator(plt.NullLocator())
    ax.grid(alpha=0.3)
    notes = "solid: values are carried too; dashed: queries and keys alone; perplexities "
    notes += " and ".join(sorted({result["unit"] for result in results}))
    left_out = [result["run"] for result in results if result not in curves + band]
    notes += "\nnot drawn: " + ", ".join(left_out) if left_out else ""
    fig.text(0.01, 0.01, notes, color="grey")

    # labels stand beside the axes, as high as their line ends or as the labels below need
    fig.subplots_adjust(left=0.08, right=0.95 - 0.0085 * max(len(end[2]) for end in ends), bottom=0.18, top=0.98)
    height = -1
    for ratio, context, label, color in sorted(ends):
        end = ax.transAxes.inverted().transform(ax.transData.transform((context, ratio)))[1]
        height = max(end, height + 0.05)
        ax.annotate(label, (context, ratio), (1.03, height), textcoords=ax.transAxes, color=color, va="center",
                    arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.7, "relpos": (0, 0.5)})
    return fig


def check_runs(runs):
    """Raise ValueError, before any work, if a run has no checkpoint."""
    for run in runs:
        if not (run / "ckpt.pt").is_file():
            raise ValueError(f"no run at {run}: {run / 'ckpt.pt'} does not exist")


def main(argv=None):
    parser = data.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("runs", nargs="*", metavar="RUN", help="folders with a ckpt.pt (default: every run under out/)")
    option("--lengths", default="", help='context lengths, such as 256,512,...,65536 ("..." doubles); default: the '
                                         "training context, doubled up to 16,384 on CPU and 65,536 on CUDA")
    option("--stretches", type=int, default=8, help="pieces of text of the longest context to score (default 8)")
    option("--data", default="", help="data set (default: the one the run was trained on)")
    option("--device", default="auto", help="cpu, cuda, cuda:1, ...")
    option("--dtype", default="float32", choices=("float32", "bfloat16"), help="default float32, on any device")
    option("--plot", action="store_true", help="draw out/extrapolation.png (needs matplotlib)")
    args = parser.parse_args(argv)
    results = []
    try:
        runs = [Path(run) for run in args.runs] or sorted(path.parent for path in Path("out").glob("*/ckpt.pt"))
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
            path = Path("out/extrapolation.png")
            path.parent.mkdir(exist_ok=True)
            plot(results).savefig(path)
            print(f"\n{path}")
    except (ValueError, OSError) as error:
        die(error)
    bad = [f"{result['run']} at {row['context']:,}" for result in results for row in result["rows"] if row["finite"] is False]
    if bad:
        print0("error: the loss is not finite:", ", ".join(dict.fromkeys(bad)), file=sys.stderr)
    leave_ranks(int(bool(bad)))
    if bad:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
