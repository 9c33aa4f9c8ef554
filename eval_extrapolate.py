"""Perplexity against context length, far beyond the training context:  python eval_extrapolate.py [RUN ...] [--plot]

Two protocols, both token-weighted, with per-token losses in float32 summed in float64:
  window  non-overlapping windows of length L, mean over all positions (the paper's);
  last    the same few target tokens at every length, each with the L tokens that end with its block (more context, nothing else).
Both come from the same forward passes: stretches of the longest context, spread evenly over the validation text, are read in
windows of every length L; `window` takes all positions, `last` the last training-context tokens of each stretch. So the tokens are the
same at every length, and a model that ignores context gets the same value. The ratio is the perplexity over that at the training context; its standard error is paired, over blocks of training-context size.
Results go to RUN/extrapolate.json after every length; what is already there is not computed again. torchrun --nproc_per_node=N eval_extrapolate.py shares the windows among N processes.
"""
import argparse
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import data
from data import die
from model import load_model
from train import autocast, device_name, join_ranks, leave_ranks, pick_dtype, ranks, say

TOKENS_AT_ONCE = 16384   # short windows go through the model in batches of this many tokens


def parse_lengths(text, train_context, longest):
    """"256,512,...,65536" -> sorted lengths; "..." fills in by doubling; empty: from the training context to `longest`."""
    words = (text or f"{train_context},...,{max(longest, train_context)}").split(",")
    lengths = []
    for i, word in enumerate(words):
        try:
            if word.strip() == "...":
                last = int(words[i + 1])
                while 0 < lengths[-1] * 2 < last:
                    lengths.append(lengths[-1] * 2)
            else:
                lengths.append(int(word))
        except (ValueError, IndexError):
            raise ValueError(f"--lengths {text}: expected numbers with commas, such as 256,512,...,65536")
    if min(lengths) < 1:
        raise ValueError(f"--lengths {text}: a length must be at least 1, got {min(lengths)}")
    return sorted({*lengths, train_context})


@torch.no_grad()
def window_nll(model, tokens, starts, length, dtype=torch.float32, tick=lambda n, length: None):
    """Losses (nats) of the windows that begin at `starts`: -> (len(starts), length) float32; one forward per window, or per
    batch of short ones. Column t is the loss of token start + t + 1 given tokens start ... start + t. Ranks share the windows."""
    device, size = next(model.parameters()).device, max(1, TOKENS_AT_ONCE // length)
    rank, world = ranks()
    nll = torch.zeros(len(starts), length, device=device)
    mine, own = starts[rank::world], nll[rank::world]
    for i in range(0, len(mine), size):
        chunk = torch.from_numpy(np.stack([tokens[s:s + length + 1] for s in mine[i:i + size]]).astype(np.int64)).to(device)
        with autocast(device, dtype):
            own[i:i + size] = model.nll(chunk[:, :-1], chunk[:, 1:])
        tick(chunk[:, 1:].numel() * len(starts) / len(mine), length)
    if world > 1:
        dist.all_reduce(nll)
    return nll.cpu().numpy()


def stretch_nll(model, tokens, starts, longest, length, **how):
    """Losses of stretches of `longest` tokens read in windows of `length` that end with the stretch (the first is shorter if length
    does not divide longest): -> (len(starts), longest). The same tokens at every length; only their context differs."""
    n, rest = divmod(longest, length)
    tiles = window_nll(model, tokens, (starts[:, None] + rest + length * np.arange(n)).ravel(), length, **how).reshape(len(starts), -1)
    return np.hstack([window_nll(model, tokens, starts, rest, **how), tiles]) if rest else tiles


def summary(nll, base, block):
    """Per-token losses and those of the same tokens at the training context -> nll, ppl, ratio and standard errors.

    Sums are in float64. stderr is that of nll, ratio_stderr that of log(ratio), both over blocks of `block` tokens.
    """
    nll, base = (a.ravel().astype(np.float64) for a in (nll, base))
    spread = lambda a: float(a.std(ddof=1) / math.sqrt(len(a))) if len(a) > 1 else None
    blocks = lambda a: a[:len(a) // block * block].reshape(-1, block).mean(1)
    exp = lambda a: math.exp(a) if a < 700 else math.inf
    with np.errstate(invalid="ignore"):                                      # infinite losses: their spread is no number
        return {"tokens": len(nll), "nll": float(nll.mean()), "ppl": exp(nll.mean()), "ratio": exp(nll.mean() - base.mean()),
                "stderr": spread(blocks(nll)), "ratio_stderr": spread(blocks(nll) - blocks(base))}


def finite(value):
    """The value for JSON: null for infinity and not-a-number."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def peak_mb(device, reset=False):
    """Peak memory since the last reset, in MB: allocated on CUDA, resident on CPU (Linux; None elsewhere)."""
    if device.type == "cuda":
        return torch.cuda.reset_peak_memory_stats(device) if reset else round(torch.cuda.max_memory_allocated(device) / 1e6)
    try:
        if reset:
            return Path("/proc/self/clear_refs").write_text("5")
        return round(int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024 / 1e6)
    except (OSError, IndexError):
        return None


class Progress:
    """A line with the share of the work done and the time left; work is counted in floating-point operations."""

    def __init__(self, model, label, jobs):
        c = model.config
        self.dense = sum(p.numel() for p in model.parameters() if p.dim() == 2)
        self.attention = c.n_layer * c.n_embd
        self.total, self.done, self.start, self.shown, self.label = sum(self.cost(*j) for j in jobs), 0, time.time(), time.time(), label

    def cost(self, n_tokens, length):
        return 2.0 * n_tokens * (self.dense + self.attention * length)

    def tick(self, n_tokens, length):
        self.done += self.cost(n_tokens, length)
        if ranks()[0] == 0:
            self.shown = data.progress(self.shown, lambda: f"{self.label}: context {length:,}, {100 * self.done / self.total:.0f}%, ETA "
                                                           f"{data.clock((time.time() - self.start) * (self.total / self.done - 1))}")


EMPTY = dict.fromkeys(("nll", "ppl", "ratio", "stderr", "ratio_stderr", "seconds", "peak_mb")) | {"windows": 0, "tokens": 0}


def evaluate(run, args):
    """Evaluate one run, write run/extrapolate.json after every length, print its table; -> the JSON's dict."""
    device = torch.device(args.device)
    dtype = pick_dtype("float32" if args.dtype == "auto" and device.type == "cpu" else args.dtype, device)
    model, saved = load_model(run / "ckpt.pt", device)
    config, out = saved["train_config"], run / "extrapolate.json"
    block, folder = config["block_size"], data.find(args.data or config["data"])
    lengths = parse_lengths(args.lengths, block, 65536 if device.type == "cuda" else 16384)
    val = data.load(folder, "val", block + 1, model.config.vocab_size)

    # what is scored: stretches of the longest context, spread evenly over the text
    longest = max(n for n in lengths if n < len(val))
    count = min(args.windows, (len(val) - 1) // longest)
    starts = np.linspace(0, len(val) - 1 - longest, count).astype(np.int64)

    # what an earlier call with the same settings has left is kept, but for the training context, the base of all ratios
    settings = {"pos": model.config.pos, "step": saved["step"], "train_context": block, "data": folder.name, "seed": config["seed"],
                "params": model.num_params()[0], "dtype": str(dtype)[6:], "stretches": count, "longest": longest}
    where, have, per_position = f"{f'{ranks()[1]} x ' if ranks()[1] > 1 else ''}{device_name(device)}", {}, []
    try:
        old = json.loads(out.read_text())
        if all(old[name] == value for name, value in settings.items()):
            have, per_position = {(r["protocol"], r["context"]): r for r in old["rows"] if r["context"] != block}, old["per_position"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    todo = [block] + [n for n in lengths if n != block and ("last", n) not in have]
    say(f"\n{run.name}: {model.config.pos}, step {saved['step']:,}, trained at {block}; {folder}: {count} x {longest:,} of "
        f"{len(val):,} validation tokens; {settings['dtype']} on {where}", end="", flush=True)
    progress, base = Progress(model, run.name, [(count * longest, n) for n in todo if n < len(val)]), None
    rehearsal = min(max(n for n in todo if n < len(val)), 2048)
    for _ in range(2):                                                       # the first starts kernels up
        start = time.perf_counter()
        window_nll(model, val, starts[:1], rehearsal, dtype)
        seconds = (time.perf_counter() - start) * progress.total / progress.cost(rehearsal, rehearsal) / ranks()[1]
    say(f", about {data.clock(seconds)}", flush=True)
    progress.start = time.time()
    for n in todo:
        rows = {"last": {}, "window": {}}
        if n < len(val):
            peak_mb(device, reset=True)
            start = time.perf_counter()
            nll = stretch_nll(model, val, starts, longest, n, dtype=dtype, tick=progress.tick)
            cost = {"seconds": round(time.perf_counter() - start, 2), "peak_mb": peak_mb(device)}
            base = nll if base is None else base
            rows = {"last": summary(nll[:, -block:], base[:, -block:], block) | {"windows": count} | cost,
                    "window": summary(nll, base, block) | {"windows": count * math.ceil(longest / n)} | cost}
            if n == longest:                                                 # loss by position, in bins of doubling size
                edges = [0] + [2 ** i for i in range(n.bit_length()) if 2 ** i < n] + [n]
                per_position = [{"from": a, "to": b, "nll": float(nll[:, a:b].astype(np.float64).mean())} for a, b in zip(edges, edges[1:])]
        have |= {(protocol, n): {"context": n, "protocol": protocol} | EMPTY | row for protocol, row in rows.items()}
        ordered = sorted(have.values(), key=lambda r: (r["protocol"], r["context"]))
        result = finite({"run": run.name} | settings | {"device": f"{where}, torch {torch.__version__}",
                                                        "rows": ordered, "per_position": per_position})
        if ranks()[0] == 0:
            data.write_json(out, result)
    if ranks()[0] == 0:
        if sys.stderr.isatty():
            print(" " * 80, end="\r", file=sys.stderr, flush=True)            # over the progress line
        table(result, lengths, len(val))
    return result


def table(result, lengths, available):
    """Print one run's rows: both protocols side by side."""
    print(f"{'context':>9} | {'last':>9} {'ratio':>8} {'+-':>6} | {'window':>9} {'ratio':>8} {'+-':>6} | seconds | peak MB")
    rows = {(r["protocol"], r["context"]): r for r in result["rows"]}
    for n in lengths:
        last, window = rows["last", n], rows["window", n]
        if last["nll"] is None:
            print(f"{n:>9,} | longer than the {available:,} tokens there are")
            continue
        cells = [f"{show(r['ppl'], '9.3f')} {show(r['ratio'], '8.3f')} {show(r['ratio_stderr'], '6.3f', '-')}" for r in (last, window)]
        print(f"{n:>9,} | {cells[0]} | {cells[1]} | {last['seconds']:7.1f} | {show(last['peak_mb'], '7,.0f', '-')}")


def compare(results):
    """All runs in one Markdown table: perplexity at the training context and protocol `last`'s ratio at every length."""
    lengths = sorted({w["context"] for r in results for w in r["rows"]})
    print("\n| run | ppl at training context | " + " | ".join(f"{n:,}" for n in lengths) + " |\n|" + "---|" * (len(lengths) + 2))
    for r in results:
        rows = {w["context"]: w for w in r["rows"] if w["protocol"] == "last"}
        cells = [show(rows[n]["ratio"], ".2f", "inf" if rows[n]["nll"] else "-") if n in rows else "" for n in lengths]
        print(f"| {r['run']} | {show(rows[r['train_context']]['ppl'], '.2f')} | " + " | ".join(cells) + " |")


def show(value, spec, missing="inf"):
    """A table cell; a perplexity that overflowed is null in the JSON and "inf" here."""
    return f"{value:{spec}}" if value is not None else f"{missing:>{spec.split('.')[0].strip(',') or 3}}"


def pyplot():
    """matplotlib is optional. Raises ValueError with the pip command where it is missing."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib")
    matplotlib.use("Agg")
    return __import__("matplotlib.pyplot").pyplot


def plot(results, path):
    """Log-log ratio of perplexity to that at the training context against context length, one line per run."""
    plt = pyplot()
    from matplotlib.ticker import FuncFormatter, NullFormatter
    fig, axes = plt.subplots(1, 2, figsize=(13, 5.5), sharey=True)
    ratios = {}
    titles = {"last": "the same target tokens at every length", "window": "windows of that length, all positions"}
    rotations = sorted({r["pos"].split("+")[0] for r in results})
    for ax, protocol in zip(axes, titles):
        for r in results:
            rows = [(w["context"], w["ratio"]) for w in r["rows"]
                    if w["protocol"] == protocol and w["ratio"] and w["context"] >= r["train_context"]]
            rotation, _, bias = r["pos"].partition("+")
            color = plt.get_cmap("tab20" if len(rotations) > 10 else "tab10")(rotations.index(rotation))
            if rows:
                ax.plot(*zip(*rows), label=r["run"], color=color, marker="o", markersize=3,
                        linestyle={"": "-", "alibi": "--", "fox": ":"}[bias])
                ratios[r["run"]] = rows[-1][1]
        for context in {r["train_context"] for r in results}:
            ax.axvline(context, color="gray", linewidth=1, linestyle=":")
            ax.annotate("training context ", (context, 1), xycoords=("data", "axes fraction"), va="top", ha="right", fontsize=8,
                        color="gray", rotation=90)
        ax.set(xscale="log", yscale="log", xlabel="context length (tokens)", title=f"{protocol}: {titles[protocol]}")
        ax.xaxis.set_major_locator(plt.FixedLocator([2 ** i for i in range(4, 24)]))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        ax.yaxis.set_major_locator(plt.LogLocator(base=10, subs=(1, 1.5, 2, 3, 5, 7)))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_minor_formatter(NullFormatter())
        ax.tick_params(axis="x", labelrotation=45)
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("perplexity / perplexity at the training context")
    handles, labels = axes[1].get_legend_handles_labels()
    best_last = sorted(range(len(labels)), key=lambda i: -ratios[labels[i]])
    fig.legend([handles[i] for i in best_last], [labels[i] for i in best_last], loc="center right", fontsize=9)
    fig.tight_layout(rect=(0, 0, 0.84, 1))
    fig.savefig(path, dpi=120)
    plt.close(fig)


def check_runs(runs):
    """Raise ValueError, before any work, if a run has no checkpoint."""
    for run in runs:
        if not (run / "ckpt.pt").is_file():
            raise ValueError(f"no run at {run}: {run / 'ckpt.pt'} does not exist")


def main(argv=None):
    parser = data.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="folders with a ckpt.pt (default: every run under out/)")
    parser.add_argument("--lengths", default="", help="context lengths, such as 256,512,...,65536 (\"...\" doubles); default: "
                        "the training context, doubled up to 16,384 on CPU and 65,536 on CUDA")
    parser.add_argument("--windows", type=int, default=8, help="stretches of the longest context to score (default 8)")
    parser.add_argument("--data", default="", help="data set (default: the one the run was trained on)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", help="bfloat16 or float32; auto is float32 on CPU, bfloat16 on CUDA")
    parser.add_argument("--plot", action="store_true", help="draw out/extrapolation.png (needs matplotlib)")
    args = parser.parse_args(argv)
    try:
        runs = [Path(r) for r in args.runs] or sorted(p.parent for p in Path("out").glob("*/ckpt.pt"))
        if not runs:
            raise ValueError("no run under out/: train one with python train.py, or name its folder")
        if args.windows < 1:
            raise ValueError("--windows must be at least 1")
        check_runs(runs)
        if args.plot:
            pyplot()                                                         # before the work, not after it
        args.device, rank, _ = join_ranks(args.device)
        results = [evaluate(run, args) for run in runs]
        if rank == 0 and len(results) > 1:
            compare(results)
        if rank == 0 and args.plot:
            path = Path("out/extrapolation.png")
            path.parent.mkdir(exist_ok=True)
            plot(results, path)
            print(f"\n{path}")
    except (ValueError, OSError) as e:
        die(e)
    leave_ranks()


if __name__ == "__main__":
    main()
