"""What every scheme costs, into speed.json, on CUDA gpu.json: python results/speed.py steps|forward|paper|gpu

steps    training steps of the tiny preset, interleaved: median time over rope's
forward  65,536 tokens through one layer with a head of 64: time over nope's (no positions), and memory
paper    the same through the paper's model; an hour on CPU
gpu      training the paper preset on random tokens: rate, MFU, memory; on CUDA
"""
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESULTS = Path(__file__).resolve().parent
sys.path[:0] = [str(RESULTS), str(RESULTS.parent)]

import numpy as np
import torch

import data
import train
from model import GPT, GPTConfig
from run import cpu
from transport import SCHEMES

ALL = [*SCHEMES, "accum_qkv+alibi", "accum_qkv+fox", "path+fox"]
SOME = ["rope", "accum_qkv", "accum_qkv+alibi", "path"]
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
TINY = {"n_layer": 4, "n_head": 2, "n_embd": 128, "vocab_size": 257}
LAYER = {"n_layer": 1, "n_head": 1, "n_embd": 64, "vocab_size": 257}


def seconds(f, *inputs):
    """Time of a call, the device's work included."""
    start = time.perf_counter()
    f(*inputs)
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_mb():
    """Peak memory of this process so far, in MB: allocated on CUDA, resident on Linux."""
    if CUDA:
        return round(torch.cuda.max_memory_allocated() / 1e6)
    status = Path("/proc/self/status").read_text()
    return round(int(re.search(r"VmHWM:\s+(\d+)", status)[1]) * 1024 / 1e6)


def steps(schemes=ALL, n=21):
    """Median time of a training step of 16 x 256 tokens: scheme -> seconds, ratio to rope's."""
    x, y = torch.randint(0, 257, (2, 16, 256), device=DEVICE)
    dtype = train.pick_dtype("auto", DEVICE.type)
    models = {pos: GPT(GPTConfig(pos=pos, **TINY)).to(DEVICE) for pos in schemes}
    optimizers = {pos: train.make_optimizer(models[pos], train.TrainConfig()) for pos in schemes}

    def step(pos):
        with train.autocast(DEVICE, dtype):
            loss = models[pos].nll(x, y).mean()
        loss.backward()
        optimizers[pos].step()
        optimizers[pos].zero_grad(set_to_none=True)

    times = [[seconds(step, pos) for pos in schemes] for _ in range(n)]
    median = dict(zip(schemes, np.median(times, axis=0)))
    return {pos: {"seconds": t, "ratio": t / median["rope"]} for pos, t in median.items()}


@torch.no_grad()
def forward(pos, T, **size):
    """A forward of T tokens in float32 -> seconds, their ratio to nope's, MB beyond a short forward's."""
    model = GPT(GPTConfig(pos=pos, **size)).to(DEVICE)
    nope = GPT(GPTConfig(pos="nope", **size)).to(DEVICE)
    x, y = torch.randint(0, 257, (2, 1, T), device=DEVICE)
    model.nll(x[:, :64], y[:, :64])
    nope.nll(x[:, :64], y[:, :64])
    before = peak_mb()
    time_model = seconds(model.nll, x, y)
    mb = peak_mb() - before
    ratio = time_model / seconds(nope.nll, x, y)
    return {"context": T, "seconds": time_model, "ratio": ratio, "mb": mb}


def training(pos, *flags):
    """-> rate, MFU and memory of a short run of the paper preset on random tokens, from its log."""
    tokens = np.random.default_rng(0).integers(0, 50257, 10 ** 6, dtype=np.uint16)
    with tempfile.TemporaryDirectory() as folder:
        for split in ("train", "val"):
            tokens.tofile(Path(folder, f"{split}.bin"))
        train.main(["--preset", "paper", "--pos", pos, "--data", folder, "--out_dir", folder,
                    "--max_iters", "60", "--eval_iters", "1", "--device", "cuda", *flags])
        lines = Path(folder, "log.jsonl").read_text().splitlines()
    rate = max(json.loads(line).get("tokens_per_second", 0) for line in lines)
    mfu = train.mfu(GPT(GPTConfig(pos=pos)), 512, rate, train.device_name(DEVICE))
    return {"tokens_per_second": rate, "mfu": mfu, "peak_mb": peak_mb()}


def alone(call):
    """A call's result from a process of its own, whose memory nothing else has touched; printed."""
    code = f"import json; from speed import *; print('\\n' + json.dumps({call}))"
    printed = subprocess.check_output([sys.executable, "-c", code], cwd=RESULTS, text=True)
    result = json.loads(printed.splitlines()[-1])
    print(call, result)
    return result


def main(what=""):
    jobs = {"paper": [f"forward('{pos}', 65536)" for pos in SOME],
            "forward": [f"forward('{pos}', 65536, **LAYER)" for pos in ALL],
            "gpu": [f"training('{pos}')" for pos in SOME],
            "steps": ["steps()"]}
    if what not in jobs:
        data.die(f"usage: speed.py {'|'.join(jobs)}")
    path = RESULTS / ("gpu.json" if CUDA else "speed.json")
    machine = f"{cpu()}, {train.device_name(DEVICE)}, torch {torch.__version__}"
    result = json.loads(path.read_text()) if path.exists() else {}
    result[what] = {"machine": machine} | {job: alone(job) for job in jobs[what]}
    data.write_json(path, result)


if __name__ == "__main__":
    main(*sys.argv[1:2])
