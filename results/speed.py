"""What every scheme costs, behind the README's figures.

    python results/speed.py steps     training steps of the tiny preset, interleaved: median time over rope's
    python results/speed.py forward   16,384 to 65,536 tokens through one layer with a head of 64: time over
                                      that of bare SDPA and matmul calls of the same sizes, and peak memory
    python results/speed.py paper     the same for 65,536 tokens and the paper's model; half an hour on CPU
    python results/speed.py gpu       training the paper preset on random tokens: rate, MFU, memory; on CUDA

Each writes its part of results/speed.json, on CUDA of results/gpu.json. random_* run the code of accum_*.
"""
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESULTS = Path(__file__).resolve().parent
sys.path[:0] = [str(RESULTS), str(RESULTS.parent)]

import numpy as np
import torch
import torch.nn.functional as F

import data
import train
from eval_extrapolate import peak_mb
from model import LOGITS_AT_ONCE, GPT, GPTConfig
from run import cpu
from transport import SCHEMES

SOME = ["rope", "accum_qkv", "accum_qkv+alibi", "path"]
ALL = [pos for pos in SCHEMES if not pos.startswith("random")]
ALL += ["accum_qkv+alibi", "accum_qkv+fox", "path+fox"]
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
LAYER = {"n_layer": 1, "n_head": 1, "n_embd": 64, "vocab_size": 257}
TINY = {"n_layer": 4, "n_head": 2, "n_embd": 128, "vocab_size": 257}


def seconds(f):
    """Time of a call, the device's work included."""
    start = time.perf_counter()
    f()
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def steps(schemes=ALL, n=21):
    """Time of a training step of 16 x 256 tokens: scheme -> milliseconds, ratio to rope's."""
    x, y = torch.randint(0, 257, (2, 16, 256), device=DEVICE)
    dtype = train.pick_dtype("auto", DEVICE.type)
    runs = {}
    for pos in schemes:
        model = GPT(GPTConfig(pos=pos, **TINY)).to(DEVICE)
        runs[pos] = model, train.make_optimizer(model, train.TrainConfig())

    def step(model, optimizer):
        with train.autocast(DEVICE, dtype):
            loss = model.nll(x, y).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    times = {pos: [] for pos in runs}
    for _ in range(n + 2):
        for pos, run in runs.items():
            times[pos].append(seconds(lambda: step(*run)))
    median = {pos: statistics.median(each[2:]) for pos, each in times.items()}
    rope = median["rope"]
    return {pos: {"ms": round(1000 * t, 1), "ratio": round(t / rope, 3)} for pos, t in median.items()}


def bare_seconds(config, T, dtype):
    """Time of the SDPA and matmul calls that a forward of T tokens cannot do without."""
    def randn(*shape):
        return torch.randn(*shape, device=DEVICE, dtype=dtype)
    C = config.n_embd
    q, k, v = randn(3, 1, config.n_head, T, C // config.n_head)
    x = randn(T, 4 * C)
    sdpa = seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    layers, head = sdpa, 0
    for rows, columns in ((C, 3 * C), (C, C), (C, 4 * C), (4 * C, C)):
        w = randn(rows, columns)
        layers += seconds(lambda: x[:, :rows] @ w)
    w, at_once = randn(C, config.vocab_size), LOGITS_AT_ONCE // config.vocab_size
    for i in range(0, T, at_once):
        head += seconds(lambda: x[i:i + at_once, :C] @ w)
    return config.n_layer * layers + head


@torch.no_grad()
def forward_of(pos, T, **size):
    """A forward of T tokens -> seconds, ratio to the bare calls, MB beyond a short forward's, MB in all."""
    config = GPTConfig(pos=pos, **size)
    model = GPT(config).to(DEVICE).eval()
    dtype = torch.bfloat16 if CUDA else torch.float32
    idx = torch.randint(0, config.vocab_size, (1, T + 1), device=DEVICE)

    def forward(n):
        with train.autocast(DEVICE, dtype):
            model.nll(idx[:, :n], idx[:, 1:n + 1])
    forward(64)
    before = peak_mb(DEVICE, reset=True)
    time_model = seconds(lambda: forward(T))
    peak = peak_mb(DEVICE)
    ratio = time_model / bare_seconds(config, T, dtype)
    return {"context": T, "seconds": round(time_model, 2), "ratio": round(ratio, 3), "mb": peak - before,
            "peak_mb": peak}


def train_of(pos, *flags):
    """-> rate, MFU and memory of a short run of the paper preset on random tokens, from its log."""
    with tempfile.TemporaryDirectory() as folder:
        tokens = np.random.default_rng(0).integers(0, 50257, 10 ** 6, dtype=np.uint16)
        for split in ("train", "val"):
            tokens.tofile(Path(folder, f"{split}.bin"))
        run = Path(folder, "run")
        train.main(["--preset", "paper", "--pos", pos, "--data", folder, "--out_dir", str(run),
                    "--max_iters", "60", "--eval_interval", "0", "--eval_iters", "1", *flags])
        entries = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    rates = [entry["tokens_per_second"] for entry in entries if "tokens_per_second" in entry]
    rate = max(rates[1:] or rates)                                           # the first one compiles
    model = GPT(GPTConfig(**entries[0]["model_config"]))
    mfu = train.mfu(model, entries[0]["train_config"]["block_size"], rate, entries[0]["device"])
    return {"tokens_per_second": round(rate), "mfu": mfu and round(mfu, 3), "peak_mb": peak_mb(DEVICE)}


def alone(call):
    """A call's result from a process of its own, whose memory nothing else has touched; printed."""
    code = f"import json, speed; print('\\n' + json.dumps(speed.{call}))"
    printed = subprocess.check_output([sys.executable, "-c", code], cwd=RESULTS, text=True)
    result = json.loads(printed.splitlines()[-1])
    print(call, result, flush=True)
    return result


def measure(what):
    if what == "steps":
        return steps()
    if what == "forward":
        lengths = (16384, 32768, 65536)
        return {pos: [alone(f"forward_of('{pos}', {T}, **speed.LAYER)") for T in lengths] for pos in ALL}
    if what == "paper":
        return {pos: alone(f"forward_of('{pos}', 65536)") for pos in (SOME if CUDA else ["accum_qkv"])}
    if what == "gpu" and CUDA:
        return {pos: alone(f"train_of('{pos}')") for pos in SOME}
    raise SystemExit("usage: speed.py steps|forward|paper|gpu ..., gpu with a CUDA device")


def main():
    path = RESULTS / ("gpu.json" if CUDA else "speed.json")
    machine = torch.cuda.get_device_name() if CUDA else f"{cpu()}, {torch.get_num_threads()} threads"
    for what in sys.argv[1:] or ["steps", "forward"]:
        result = json.loads(path.read_text()) if path.exists() else {}
        result[what] = measure(what) | {"machine": f"{machine}, torch {torch.__version__}"}
        data.write_json(path, result)


if __name__ == "__main__":
    main()
