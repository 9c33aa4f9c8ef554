"""What a training step and a long text cost, into speed.json (on CUDA gpu.json):

    python results/speed.py steps     training steps of the tiny shape, of ours and of a plain GPT
    python results/speed.py large     the same for 16 x 768
    python results/speed.py forward   256 to 65,536 tokens through one layer, and its matmuls and SDPA alone
    python results/speed.py gpu       training the paper preset on random tokens: rate, MFU, memory; on CUDA

Times are medians of interleaved calls (65,536 tokens: one call; large: one step); on CPU those of one thread
of this process, on a quiet machine, `steps` and `large` with run.py's two settings of glibc's memory (without
them the same step may differ by a third from run to run). Differences of 5 % are noise all the same.

A step of the tiny shape has 20 GFLOP of matmuls and 7.5 of attention; SDPA's backward pass, in small blocks
at 256 tokens, takes longer than all matmuls. PaTH adds 12.5 GFLOP of products in float32, more than half of
the time that it takes beyond RoPE's. Tried there, medians of 5 to 15, and not taken:
  rotations in bfloat16      250 against 250 ms a step (rope), 313 against 320 (accum_qkv): noise
  SDPA in float32            alone 20 against 24 ms forward and back, but 118 against 101 at 512 tokens
  attention written out      in bfloat16 28 against 24 ms, 244 against 101 at 512, and logits are rounded
  PaTH's products as one     q and w with k and w: 96 against 99 ms a layer: noise
  PaTH's chunks in a tree    113 against 99 ms a layer
  chunks of 32, of 128       PaTH 122, 129 against 129 ms, reflections 98, 139 against 90
  short convolution, shifts  20 against 9 ms
  PaTH compiled              112 against 160 ms a layer in float32, after 59 s of CPU time for one layer; in
                             bfloat16 the model, not path_attention alone, has NaN in 56 of 128 channels of
                             the gradient of k (torch 2.13, one layer of 64 tokens is enough)
Not run: inverting PaTH's triangle by ten matmuls of 0.9 ms each, where the solve takes 2.
"""
import json
import re
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "results"), str(ROOT)]

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import data
import train
from model import GPT, GPTConfig
from run import cpu

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
TINY = {"n_layer": 4, "n_head": 2, "n_embd": 128, "vocab_size": 257}
LARGE = {"n_layer": 16, "n_head": 12, "n_embd": 768, "vocab_size": 50257}
LAYER = {"n_layer": 1, "n_head": 1, "n_embd": 64, "vocab_size": 257}
SOME = ["rope", "accum_qkv", "accum_qkv+alibi", "path"]
OTHERS = ["hidden_qkv", "alibi", "fox", "accum_qkv+alibi", "householder_qk", "householder_qkv", "path"]
# name of a model, its precision, and is it compiled?
STEPS = [
    ("alone", "bfloat16", False),
    *[(pos, "bfloat16", False) for pos in ("plain", "nope", "rope", "accum_qkv", *OTHERS)],
    *[(pos, "bfloat16", True) for pos in ("plain", "rope", "accum_qkv")],
    *[(pos, "float32", False) for pos in ("plain", "accum_qkv")],
]
LARGE_STEPS = [(pos, "bfloat16", False) for pos in ("alone", "plain", "rope", "accum_qkv")]


# -----------------------------------------------------------------------------------------------------------
# What ours is measured against: a GPT as everyone writes it, and its matmuls and attention alone

class PlainBlock(nn.Module):
    def __init__(self, width, n_head):
        super().__init__()
        self.n_head = n_head
        self.first, self.second = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        parts = self.qkv(self.first(x)).chunk(3, dim=-1)
        q, k, v = [part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in parts]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Plain(nn.Module):
    """Learned positions, SDPA, GELU MLP, tied head."""

    def __init__(self, T, n_layer, n_head, n_embd, vocab_size):
        super().__init__()
        self.tokens = nn.Embedding(-(-vocab_size // 64) * 64, n_embd)
        self.positions = nn.Embedding(T, n_embd)
        self.blocks = nn.ModuleList(PlainBlock(n_embd, n_head) for _ in range(n_layer))
        self.norm = nn.LayerNorm(n_embd, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, idx, targets):
        x = self.tokens(idx) + self.positions.weight[:idx.size(1)]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def alone(B, T, dtype, n_layer, n_head, n_embd, vocab_size, backward=True):
    """-> a function that does a model's matmuls and SDPA, and no more: a bound for any of them."""
    def tensor(*shape):
        return torch.randn(shape, device=DEVICE).to(dtype).requires_grad_(backward)

    C, V = n_embd, -(-vocab_size // 64) * 64
    x, hidden = tensor(B * T, C), tensor(B * T, 4 * C)
    layer = [(x, tensor(3 * C, C)), (x, tensor(C, C)), (x, tensor(4 * C, C)), (hidden, tensor(C, 4 * C))]
    matmuls = n_layer * layer + [(x, tensor(V, C))]
    q, k, v = (tensor(B, T, n_head, C // n_head).transpose(1, 2) for _ in range(3))

    def run(f, *inputs, **how):
        y = f(*inputs, **how)
        if backward:
            torch.autograd.grad(y, inputs, y)

    def all_of_it():
        for x, weight in matmuls:
            run(F.linear, x, weight)
        for _ in range(n_layer):
            run(F.scaled_dot_product_attention, q, k, v, is_causal=True)

    return all_of_it


# -----------------------------------------------------------------------------------------------------------
# Clocks

def seconds(f):
    """Time of a call: of this process on CPU, of the device's work on CUDA."""
    clock = time.perf_counter if CUDA else time.process_time
    finish()
    start = clock()
    f()
    finish()
    return clock() - start


def finish():
    """Wait for what the device has been given."""
    if CUDA:
        torch.cuda.synchronize()


def medians(calls, n):
    """Call all in turn, n times after a first time, which compiles -> the median time of each."""
    for f in calls:
        f()
    times = [[seconds(f) for f in calls] for _ in range(n)]
    return np.median(times, axis=0).tolist()


def stepper(name, dtype, compiled, B, T, **size):
    """-> a function that takes one training step of B x T tokens. A plain GPT has its own AdamW."""
    dtype = getattr(torch, dtype)
    if name == "alone":
        return alone(B, T, dtype, **size)
    model = Plain(T, **size) if name == "plain" else GPT(GPTConfig(pos=name, **size))
    model = model.to(DEVICE)
    optimizer = train.make_optimizer(model, train.TrainConfig())
    forward = torch.compile(model) if compiled else model
    x, y = torch.randint(0, size["vocab_size"], (2, B, T), device=DEVICE)

    def step():
        with train.autocast(DEVICE, dtype):
            loss = forward(x, y)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


# -----------------------------------------------------------------------------------------------------------
# Measurements

def steps(models=STEPS, n=7, B=16, T=256, **size):
    """-> rows: a model's median step, its tokens per second, its speed over that of plain, equal in precision
    and compiler, and over plain in float32, which is a plain GPT's default on CPU (None: not measured)."""
    size = size or TINY
    times = medians([stepper(*model, B, T, **size) for model in models], n)
    median = dict(zip(models, times))
    rows = []
    for (name, dtype, compiled), median_time in median.items():
        rows.append({
            "model": name, "dtype": dtype, "compiled": compiled, "seconds": median_time,
            "tokens_per_second": B * T / median_time,
            "over_plain": over(median, ("plain", dtype, compiled), median_time),
            "over_default": over(median, ("plain", "float32", False), median_time),
        })
    return {"tokens": [B, T], **size, "steps": n, "rows": rows}


def over(median, model, time):
    return median[model] / time if model in median else None


@torch.no_grad()
def forward(names=("nope", "rope", *SOME[1:], "householder_qkv"), lengths=(256, 4096, 65536), most=9):
    """Time of a text through one layer in float32, over that of its matmuls and SDPA alone -> rows."""
    rows = []
    for T in lengths:
        x, y = torch.randint(0, 257, (2, 1, T), device=DEVICE)
        calls = [alone(1, T, torch.float32, **LAYER, backward=False)]
        for pos in names:
            model = GPT(GPTConfig(pos=pos, **LAYER)).to(DEVICE)
            calls.append(lambda model=model: model.nll(x, y))
        times = medians(calls, most) if T < 32768 else [seconds(f) for f in calls]
        for pos, taken in zip(("alone", *names), times):
            rows.append({"context": T, "model": pos, "seconds": taken, "over_alone": taken / times[0]})
    return {**LAYER, "rows": rows}


def training(pos, *flags):
    """-> rate, MFU and memory of a short run of the paper preset on random tokens, from its log."""
    tokens = np.random.default_rng(0).integers(0, 50257, 10 ** 6, dtype=np.uint16)
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        for split in ("train", "val"):
            tokens.tofile(Path(folder, f"{split}.bin"))
        train.main(["--preset", "paper", "--pos", pos, "--data", folder, "--out_dir", folder,
                    "--max_iters", "60", "--eval_iters", "1", "--device", "cuda", *flags])
        lines = Path(folder, "log.jsonl").read_text().splitlines()
    rate = max(json.loads(line).get("tokens_per_second", 0) for line in lines)
    with torch.device("meta"):
        model = GPT(GPTConfig(pos=pos))
    mfu = train.mfu(model, 512, rate, train.device_name(DEVICE))
    return {"model": pos, "tokens_per_second": rate, "mfu": mfu, "peak_mb": peak_mb()}


@torch.no_grad()
def long_text(pos):
    """65,536 tokens through the paper's model -> seconds and memory."""
    model = GPT(GPTConfig(pos=pos)).to(DEVICE)
    x, y = torch.randint(0, 50257, (2, 1, 65536), device=DEVICE)
    model.nll(x[:, :512], y[:, :512])
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    return {"model": pos, "seconds": seconds(lambda: model.nll(x, y)), "peak_mb": peak_mb()}


def peak_mb():
    """Peak memory so far, in MB: allocated on CUDA, resident on Linux."""
    if CUDA:
        return round(torch.cuda.max_memory_allocated() / 1e6)
    status = Path("/proc/self/status").read_text()
    return round(int(re.search(r"VmHWM:\s+(\d+)", status)[1]) * 1024 / 1e6)


def main(what=""):
    jobs = {
        "steps": steps,
        "large": lambda: steps(LARGE_STEPS, n=1, B=4, T=512, **LARGE),
        "forward": forward,
        "gpu": lambda: {"training": [training(p) for p in SOME], "long_text": [long_text(p) for p in SOME]},
    }
    if what not in jobs:
        data.die(f"usage: speed.py {'|'.join(jobs)}")
    if not CUDA:
        torch.set_num_threads(1)
    path = ROOT / "results" / ("gpu.json" if CUDA else "speed.json")
    clock = "wall time" if CUDA else "CPU time of the process"
    made = {"machine": f"{cpu()}, {train.device_name(DEVICE)}, torch {torch.__version__}", "clock": clock}
    result = json.loads(path.read_text()) if path.exists() else {}
    result[what] = made | jobs[what]()
    data.write_json(path, result)
    for row in result[what].get("rows", []):
        print(row)


if __name__ == "__main__":
    main(*sys.argv[1:2])
