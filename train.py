"""Train a decoder under one positional scheme:  python train.py --pos accum_qkv

Runs on a bare laptop (preset tiny: the standard library as bytes, a few minutes on two cores), on CUDA, and on several
processes under torchrun. Every field of GPTConfig and TrainConfig is a flag; a preset sets several at once, and flags
given by hand win. --resume continues a run exactly.
"""
import argparse
import json
import math
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import data
if not hasattr(data, "describe"):     # until data.py has these
    data.describe = lambda folder: ("bytes", data.vocabulary(folder))
    data.check_encoding = lambda folder, encoding: None
from model import GPT, GPTConfig, is_positional, load_model
from transport import SCHEMES

try:
    import fcntl
except ImportError:          # Windows: nothing keeps two runs out of one folder there
    fcntl = None

PRESETS = {
    "tiny": dict(
        n_layer=4, n_head=2, n_embd=128, data="stdlib", block_size=256, batch_size=16, max_iters=1200,
        learning_rate=3e-3, min_lr=3e-4, warmup_iters=50),
    "small": dict(
        n_layer=8, n_head=6, n_embd=384, data="stdlib", block_size=512, batch_size=32, max_iters=2000,
        learning_rate=1e-3, min_lr=1e-4, warmup_iters=100),
    "paper": dict(
        n_layer=16, n_head=12, n_embd=768, data="openwebtext", block_size=512, batch_size=64,
        gradient_accumulation_steps=16, max_tokens=3e9, eval_iters=100,
        learning_rate=6e-4, min_lr=6e-5, warmup_iters=500),
}

# Peak in TFLOP/s: bfloat16, dense, accumulated in float32, from the data sheets. The key is the whole name that
# torch.cuda.get_device_name gives, less "NVIDIA ": a device of another name (a laptop's, a slice) shows no MFU.
PEAK_TFLOPS = {
    "B200": 2250, "H200": 989, "H200 NVL": 835, "GH200 480GB": 989,
    "H100 80GB HBM3": 989, "H100 PCIe": 756, "H100 NVL": 835, "H800": 989, "H800 PCIe": 756,
    "A100-SXM4-40GB": 312, "A100-SXM4-80GB": 312, "A100-PCIE-40GB": 312, "A100 80GB PCIe": 312,
    "A800-SXM4-80GB": 312, "A800 80GB PCIe": 312, "L40S": 362, "L40": 181, "L4": 121,
    "GeForce RTX 4090": 165, "GeForce RTX 3090": 71,
}

EVAL_SEED = 2 ** 32 - 1      # validation batches are the same for every run, whatever its seed and its micro-batches
EVAL_BATCH = 16


# ---------------------------------------------------------------------------------------------------------------------
# Configuration

def option(default, text, low=None, below=None):
    """A field of TrainConfig with its help and, for numbers, the range it must be in."""
    return field(default=default, metadata={"help": text, "low": low, "below": below})


def size(default, text):
    return option(default, text, low=1, below=2 ** 62)


@dataclass
class TrainConfig:
    preset: str = option("auto", "tiny, small or paper; auto is paper on CUDA with OpenWebText prepared, else tiny")
    data: str = option("stdlib", "data set: a name under data/, or a folder with train.bin and val.bin")
    out_dir: str = option("", "where the checkpoint and the log go (empty: out/PRESET-POS, or out/PRESET-POS-seedN)")
    block_size: int = size(256, "training context in tokens; nothing in the model is sized by it")
    batch_size: int = size(32, "sequences per micro-batch")
    gradient_accumulation_steps: int = size(1, "micro-batches per iter, over all processes")
    max_iters: int = size(1000, "iters in all")
    max_tokens: float = option(0, "tokens to train on in all, in place of max_iters (0: as max_iters says)", 0, 1e18)
    learning_rate: float = option(2e-3, "peak of the cosine schedule", 0, math.inf)
    min_lr: float = option(2e-4, "its end", 0, math.inf)
    warmup_iters: int = option(50, "iters of linear warm-up", 0, 2 ** 62)
    weight_decay: float = option(0.1, "on matrices, but not on positional parameters", 0, math.inf)
    beta1: float = option(0.9, "AdamW", 0, 1)
    beta2: float = option(0.95, "AdamW", 0, 1)
    grad_clip: float = option(1.0, "largest gradient norm (0: no clipping)", 0, math.inf)
    eval_interval: int = option(250, "iters between validations and saves (0: only at the end)", 0, 2 ** 62)
    eval_iters: int = size(20, f"validation batches of {EVAL_BATCH} sequences")
    log_interval: int = size(10, "iters between log lines")
    seed: int = option(1, "of initial weights, of random angle tables and of the order of the data", 0, 2 ** 63)
    device: str = option("auto", "cpu, cuda, cuda:1, ...; auto is cuda where there is one")
    dtype: str = option("auto", "bfloat16 (autocast) or float32; auto is bfloat16 where the device is fast at it")
    compile: bool = option(None, "torch.compile; default on CUDA only")

    def __post_init__(self):
        for f in fields(self):
            check_option(f, getattr(self, f.name))
        if self.learning_rate == 0 or self.min_lr > self.learning_rate:
            raise ValueError(f"learning_rate must be above 0 and at least min_lr {self.min_lr}, got {self.learning_rate}")
        if self.max_tokens:
            tokens_per_iter = self.batch_size * self.gradient_accumulation_steps * self.block_size
            self.max_iters = math.ceil(self.max_tokens / tokens_per_iter)


def check_option(f, value):
    """Raises ValueError unless value is of the field's type (an int will do for a float) and in its range."""
    if value is None and f.default is None:
        return
    kinds = (int, float) if f.type is float else f.type
    if not isinstance(value, kinds) or (isinstance(value, bool) and f.type is not bool):
        raise ValueError(f"{f.name} must be of type {f.type.__name__}, not {type(value).__name__}")
    low, below = f.metadata["low"], f.metadata["below"]
    if low is not None and not low <= value < below:
        raise ValueError(f"{f.name} must be at least {low} and less than {below}, got {value}")


def parse_args(argv=None):
    """-> (flags given by hand as a dict, preset, out_dir, resume)."""
    schemes = "\n".join(f"  {name:<16} {scheme.kind}: {scheme.about}" for name, scheme in SCHEMES.items())
    parser = data.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"schemes for --pos (ROTATION, BIAS or ROTATION+BIAS):\n{schemes}")
    parser.add_argument(
        "--resume", action="store_true",
        help="continue the run in --out_dir from its checkpoint; other flags change it from there on, "
             "but the model and the seed stay")
    for cls in (GPTConfig, TrainConfig):
        group = parser.add_argument_group(cls.__name__)
        for f in fields(cls):
            text = f"{f.metadata['help']} (default: {f.default})".replace("%", "%%")
            kind = dict(action=argparse.BooleanOptionalAction) if f.type is bool else dict(type=f.type)
            group.add_argument(f"--{f.name}", default=argparse.SUPPRESS, help=text, **kind)

    given = vars(parser.parse_args(argv))
    resume = given.pop("resume")
    if "max_iters" in given:
        given.setdefault("max_tokens", 0)
    preset = pick_preset(given.get("preset", "auto"))
    seed = given.get("seed", TrainConfig.seed)
    name = f"{preset}-{given.get('pos', GPTConfig.pos)}" + (f"-seed{seed}" if seed != 1 else "")
    return given, preset, given.get("out_dir") or f"out/{name}", resume


def pick_preset(name):
    if name == "auto":
        ready = torch.cuda.is_available() and Path("data/openwebtext/train.bin").exists()
        name, why = "tiny", "no GPU with data/openwebtext prepared; others: --preset small, --preset paper"
        if ready:
            name, why = "paper", "OpenWebText is prepared and there is a GPU"
        print0(f"preset {name}: {why}")
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name}: {', '.join(PRESETS)}")
    return name


def new_configs(given, preset, out_dir):
    """-> GPTConfig and TrainConfig of a new run."""
    values = PRESETS[preset] | given | {"preset": preset, "out_dir": out_dir}
    return [cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values}) for cls in (GPTConfig, TrainConfig)]


def resumed_config(given, saved, ckpt):
    """-> TrainConfig of a run that goes on from the checkpoint's dict `saved`, with the flags given by hand on top."""
    kinds = {"optimizer": dict, "iter_num": int, "train_config": dict, "vocab_size": int, "encoding": object}
    old = saved.get("train_config")
    if not all(isinstance(saved.get(name), kind) for name, kind in kinds.items()) \
            or old.keys() != {f.name for f in fields(TrainConfig)} or "best_val_loss" not in saved:
        raise ValueError(f"{ckpt} holds a model, but not what --resume needs: choose another --out_dir")
    TrainConfig(**old)                                       # refuses values that are none
    fixed = saved["model_config"] | {"seed": old["seed"]}
    for name, value in given.items():
        if name in fixed and value != fixed[name]:
            raise ValueError(f"{ckpt} was trained with {name} {fixed[name]}, not {value}; leave --{name} out, "
                             "or choose another --out_dir")
    changes = {name: value for name, value in given.items() if name not in fixed and name != "preset"}
    return TrainConfig(**old | changes)


# ---------------------------------------------------------------------------------------------------------------------
# Device and ranks

def pick_device(name):
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"unknown device {name}: cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: this machine has no CUDA device, or torch was built without CUDA")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices, from cuda:0 on")
    return name


def pick_dtype(name, device):
    """bfloat16 where the device multiplies it fast; never float16."""
    if name not in ("auto", "bfloat16", "float32"):
        raise ValueError(f"unknown dtype {name}: auto, bfloat16 or float32")
    if name != "auto":
        return getattr(torch, name)
    if torch.device(device).type == "cuda":
        fast = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        checks = "_is_avx512_bf16_supported", "_is_amx_tile_supported"
        fast = any(getattr(torch.cpu, check, bool)() for check in checks)
    return torch.bfloat16 if fast else torch.float32


def autocast(device, dtype):
    """The context of a forward pass: bfloat16 autocast where dtype says so."""
    return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=dtype == torch.bfloat16)


def device_name(device):
    """What a run was measured on, in words."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def can_compile(device):
    """Try torch.compile on a small function: it needs a C++ compiler on CPU, Triton on CUDA."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.zeros(8, device=device))
        return True
    except Exception as e:      # whatever the compiler stack raises
        print0(f"torch.compile does not work here ({type(e).__name__}); running without it")
        return False


def ranks():
    """-> rank and world size of this process, as torchrun sets them; 0 and 1 without it."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def print0(*words, **how):
    """Print, on one rank only."""
    if ranks()[0] == 0:
        print(*words, **how)


def join_ranks(device):
    """Under torchrun: join the process group, with a GPU for each rank. -> device, rank, world size."""
    device = pick_device(device)
    rank, world_size = ranks()
    if world_size > 1:
        if device == "cuda":
            device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if "cuda" in device else "gloo")
    return device, rank, world_size


def over_ranks(value):
    """Sum of a number over all ranks: among the hosts, whatever their devices are doing."""
    if ranks()[1] == 1:
        return value
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


def leave_ranks(code=0):
    """Under torchrun, end this rank when all are done, without tearing down gloo's threads: one exit in ten aborts there."""
    if ranks()[1] > 1:
        dist.barrier()
        sys.stdout.flush()
        os._exit(code)


# ---------------------------------------------------------------------------------------------------------------------
# Optimizer, schedule, speed

def make_optimizer(model, config):
    """Fused AdamW. Weight decay on matrices only, and not on positional parameters: decay would pull angles to zero."""
    decayed, plain = [], []
    for name, parameter in model.named_parameters():
        matrix = parameter.dim() >= 2 and not is_positional(name)
        (decayed if matrix else plain).append(parameter)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True)
    optimizer.found_inf = torch.zeros((), device=model.wte.weight.device)
    return optimizer


def load_moments(optimizer, saved):
    """Take over AdamW's moments from a checkpoint; its settings stay those of the configuration.

    Raises ValueError if the moments are not those of these parameters.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = saved.get("state")
    try:
        for i, parameter in enumerate(parameters):
            shapes = [tuple(state[i][name].shape) for name in ("exp_avg", "exp_avg_sq", "step")]
            if shapes != [parameter.shape, parameter.shape, ()]:
                raise ValueError
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError("the optimizer's state in the checkpoint does not fit its model")


def learning_rate(iter_num, config):
    """Linear warm-up, then a cosine from learning_rate to min_lr at the last iter."""
    if iter_num < config.warmup_iters:
        return config.learning_rate * (iter_num + 1) / config.warmup_iters
    done = (iter_num - config.warmup_iters) / max(1, config.max_iters - 1 - config.warmup_iters)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return config.min_lr + cosine * (config.learning_rate - config.min_lr)


def flops_per_token(model, block_size):
    """6 per matmul weight (the tied head counts, look-ups do not) + 12 L C T for attention, as in PaLM."""
    c = model.config
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    return 6 * (linear + model.wte.weight.numel()) + 12 * c.n_layer * c.n_embd * block_size


def mfu(model, block_size, tokens_per_second, name):
    """Model FLOPs utilisation: the fraction of the bf16 peak that one device of this name uses; None if unknown."""
    peak = PEAK_TFLOPS.get(name.removeprefix("NVIDIA "))
    return tokens_per_second * flops_per_token(model, block_size) / (peak * 1e12) if peak else None


def to_device(arrays, device):
    """int64 arrays -> tensors on the device, copied while it computes."""
    tensors = [torch.from_numpy(np.ascontiguousarray(a)) for a in arrays]
    if "cuda" in device:
        tensors = [t.pin_memory() for t in tensors]
    return [t.to(device, non_blocking=True) for t in tensors]


# ---------------------------------------------------------------------------------------------------------------------
# A run

def open_log(out_dir):
    """The run's log, for reading and appending; held until this process ends, so that two runs never share a folder.

    Raises ValueError if another process holds it.
    """
    if ranks()[0]:
        return open(os.devnull, "a+b", buffering=0)
    out_dir.mkdir(parents=True, exist_ok=True)
    log_file = open(out_dir / "log.jsonl", "a+b", buffering=0)
    try:
        if fcntl:
            fcntl.flock(log_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{out_dir} is in use by another training: wait for its end, or choose another --out_dir")
    except OSError:
        pass                                                 # a file system without locks
    return log_file


def forget_after(log_file, iter_num):
    """Drop the lines of a log that are from after iter_num, or cannot be read."""
    log_file.seek(0)
    lines = log_file.read().split(b"\n")
    kept = b"".join(line + b"\n" for line in lines if belongs(line, iter_num))
    if kept != b"\n".join(lines):
        log_file.truncate(0)
        log_file.write(kept)


def belongs(line, iter_num):
    try:
        return json.loads(line)["iter_num"] <= iter_num
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


class Run:
    """A training run. Bad input raises ValueError or OSError here, before anything is written."""

    def __init__(self, argv=None):
        given, preset, out_dir, resume = parse_args(argv)
        self.out, self.ckpt = Path(out_dir), Path(out_dir) / "ckpt.pt"
        self.log_file = None
        if resume:
            if self.ckpt.exists():
                self.log_file = open_log(self.out)           # before the checkpoint is read: it may still be changing
            self.raw_model, saved = load_model(self.ckpt)
            self.config = resumed_config(given | {"out_dir": out_dir}, saved, self.ckpt)
            self.model_config = self.raw_model.config
        elif self.ckpt.exists():
            raise ValueError(f"{self.ckpt} exists: --resume continues it; choose another --out_dir, or delete it "
                             "to start again")
        else:
            self.model_config, self.config = new_configs(given, preset, out_dir)
        self.device, self.rank, self.world_size = self.join()
        self.open_data(saved if resume else None, given)
        if not resume:
            torch.manual_seed(self.config.seed)
            self.raw_model = GPT(self.model_config)
        self.raw_model.to(self.device).train()
        self.optimizer = make_optimizer(self.raw_model, self.config)
        self.iter_num, self.best_val_loss = 0, None
        if resume:
            load_moments(self.optimizer, saved["optimizer"])
            self.iter_num, self.best_val_loss = saved["iter_num"], saved["best_val_loss"]
        self.log_file = self.log_file or open_log(self.out)
        forget_after(self.log_file, self.iter_num if resume else -1)
        self.wrap_model()

    def join(self):
        """Join the other ranks. -> device, rank, world size."""
        config = self.config
        rank, world_size = ranks()
        self.sequences = config.batch_size * config.gradient_accumulation_steps   # of an iter, over all ranks
        if self.sequences % world_size:
            raise ValueError(f"{config.batch_size} x {config.gradient_accumulation_steps} sequences per iter cannot be "
                             f"shared by {world_size} ranks")
        return join_ranks(config.device)

    def open_data(self, saved, given):
        config = self.config
        if self.rank == 0:
            data.find(config.data)                           # one rank prepares the default corpus
        over_ranks(0)                                        # the others wait for it
        self.folder = data.find(config.data)
        self.encoding, self.vocab_size = data.describe(self.folder)
        if saved:
            data.check_encoding(self.folder, saved["encoding"])
        elif "vocab_size" not in given:
            self.model_config = replace(self.model_config, vocab_size=self.vocab_size)
        if self.model_config.vocab_size < self.vocab_size:
            raise ValueError(f"{self.folder} has {self.vocab_size:,} token ids, a model with vocab_size "
                             f"{self.model_config.vocab_size:,} is too small for them: leave --vocab_size out")
        self.train_tokens, self.val_tokens = [
            data.load(self.folder, split, config.block_size + 1, self.vocab_size) for split in ("train", "val")]

    def wrap_model(self):
        """self.model is raw_model, compiled and over all ranks; self.ctx the context of its forward pass."""
        config = self.config
        dtype = pick_dtype(config.dtype, self.device)
        # TF32 for a float32 run; under bfloat16 autocast only the transport multiplies in float32, and needs the bits
        torch.set_float32_matmul_precision("high" if dtype == torch.float32 else "highest")
        self.ctx = autocast(self.device, dtype)
        compiled = "cuda" in self.device if config.compile is None else config.compile
        compiled = compiled and can_compile(self.device)
        self.model = torch.compile(self.raw_model) if compiled else self.raw_model
        if self.world_size > 1:
            torch._dynamo.config.optimize_ddp = False        # its splitting refuses the checkpointed loss in older releases
            device_ids = [self.device] if "cuda" in self.device else None
            self.model = DistributedDataParallel(self.model, device_ids=device_ids)
        total, positional = self.raw_model.num_params()
        self.device_name = device_name(self.device)
        self.log(iter_num=self.iter_num, model_config=asdict(self.model_config), train_config=asdict(config), params=total,
                 device=self.device_name, dtype=str(dtype)[6:], compile=compiled, torch=torch.__version__)
        print0(f"{self.model_config.pos}: {self.model_config.n_layer} layers x {self.model_config.n_embd}, "
               f"{total / 1e6:.2f}M parameters ({positional:,} positional), context {config.block_size}, {self.folder}\n"
               f"{self.world_size} x {self.device_name}, {str(dtype)[6:]}{', compiled' if compiled else ''}, "
               f"{self.sequences * config.block_size:,} tokens per iter, {config.max_iters:,} iters -> {self.out}", flush=True)
        self.latest = torch.zeros(3, device=self.device)     # iter, loss and gradient norm of the latest update
        self.loss_sum = torch.zeros((), device=self.device)
        self.timed, self.started = self.iter_num, time.perf_counter()

    def batch(self):
        """-> x, y (sequences of this rank, block_size): the tokens of this iter."""
        arrays = data.batch(self.train_tokens, self.iter_num, self.config.seed, self.rank, self.world_size,
                            batch_size=self.sequences, block_size=self.config.block_size)
        return to_device(arrays, self.device)

    def update(self, loss, lr):
        """One AdamW update with the gradients there are. The host does not wait for the device.

        From the first loss or gradient on that is not finite, the device skips every update (found_inf is AdamW's own
        switch for that), and self.latest stays at the culprit for check().
        """
        if self.world_size > 1:
            dist.all_reduce(loss)
            loss /= self.world_size
        norm = torch.nn.utils.clip_grad_norm_(self.raw_model.parameters(), self.config.grad_clip or math.inf)
        latest = torch.stack((torch.full_like(loss, self.iter_num + 1), loss, norm))
        self.latest = torch.where(self.optimizer.found_inf > 0, self.latest, latest)
        self.optimizer.found_inf = 1.0 - self.latest.isfinite().all().float()
        self.loss_sum += loss
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def check(self):
        """Wait for the device; stop the run if a loss or a gradient was not finite. -> the latest gradient norm."""
        iter_num, loss, norm = self.latest.tolist()
        if not math.isfinite(loss + norm):
            self.fail(f"the loss at iter {iter_num:,.0f} is {loss}, its gradient norm {norm}")
        return norm

    def fail(self, message):
        last_good = f"{self.ckpt} is the last good checkpoint" if self.ckpt.exists() else "there is no checkpoint yet"
        print0(f"error: {message}; {last_good}", file=sys.stderr)
        raise SystemExit(1)

    def log(self, **entry):
        try:
            self.log_file.write(json.dumps(entry).encode() + b"\n")
        except OSError as e:                                 # such as a full disk
            self.fail(f"{self.log_file.name} cannot be written: {e}")

    def progress(self, lr):
        """Print and log where the training is."""
        norm = self.check()
        config = self.config
        iters = self.iter_num - self.timed
        seconds = (time.perf_counter() - self.started) / iters
        loss = self.loss_sum.item() / iters
        rate = self.sequences * config.block_size / seconds
        used = mfu(self.raw_model, config.block_size, rate / self.world_size, self.device_name)
        print0(f"iter {self.iter_num:,}/{config.max_iters:,} ({100 * self.iter_num / config.max_iters:.0f}%) | "
               f"loss {loss:.4f} | lr {lr:.1e} | {1000 * seconds:.0f} ms | {rate:,.0f} tok/s | "
               f"{f'MFU {100 * used:.1f}% | ' if used else ''}"
               f"ETA {data.clock(seconds * (config.max_iters - self.iter_num))}", flush=True)
        self.log(iter_num=self.iter_num, loss=loss, lr=lr, grad_norm=norm, ms=1000 * seconds, tokens_per_second=rate)
        self.loss_sum.zero_()
        self.timed, self.started = self.iter_num, time.perf_counter()

    @torch.no_grad()
    def validate(self):
        """Validate, save and log the result. Not part of the time of an iter."""
        self.check()
        paused = time.perf_counter()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        self.raw_model.eval()
        for i in range(self.rank, self.config.eval_iters, self.world_size):
            x, y = to_device(data.batch(self.val_tokens, i, EVAL_SEED, batch_size=EVAL_BATCH,
                                        block_size=self.config.block_size), self.device)
            with self.ctx:
                total += self.raw_model(x, y)[1]
        self.raw_model.train()
        loss = over_ranks(total.item()) / self.config.eval_iters
        if not math.isfinite(loss):
            self.fail(f"the validation loss at iter {self.iter_num:,} is {loss}")
        self.best_val_loss = loss if self.best_val_loss is None else min(self.best_val_loss, loss)
        self.save()
        perplexity = math.exp(min(loss, 700))
        print0(f"iter {self.iter_num:,}: validation loss {loss:.4f}, perplexity {perplexity:.2f}, saved {self.ckpt}", flush=True)
        self.log(iter_num=self.iter_num, val_loss=loss, best_val_loss=self.best_val_loss)
        self.started += time.perf_counter() - paused

    def save(self):
        """Write the checkpoint, whole or not at all, on one rank."""
        self.check()
        if self.rank:
            return
        saved = {"model": self.raw_model.state_dict(), "optimizer": self.optimizer.state_dict(), "iter_num": self.iter_num,
                 "best_val_loss": self.best_val_loss, "model_config": asdict(self.model_config),
                 "train_config": asdict(self.config), "encoding": self.encoding, "vocab_size": self.vocab_size}
        try:
            with data.written_whole(self.ckpt, "wb", "partial") as f:
                torch.save(saved, f)
        except (OSError, RuntimeError) as e:                 # such as a full disk
            self.fail(f"iter {self.iter_num:,} could not be saved: {e}")


def catch_signals():
    """-> a list that will hold the number of the first SIGINT or SIGTERM; a second one kills."""
    caught = []

    def on_signal(number, frame):
        caught.append(number)
        signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    return caught


def train(run):
    """The training loop. run.iter_num counts the updates done. -> exit status."""
    config, model = run.config, run.model
    if run.iter_num >= config.max_iters:
        print0(f"nothing to do: {run.ckpt} is at iter {run.iter_num:,}; --max_iters asks for more")

    stop, caught = False, catch_signals()
    while run.iter_num < config.max_iters and not stop:
        x, y = run.batch()
        loss = torch.zeros((), device=run.device)
        micro_batches = list(zip(x.split(config.batch_size), y.split(config.batch_size)))
        for i, (micro_x, micro_y) in enumerate(micro_batches):
            if run.world_size > 1:                           # gradients meet in the last backward pass
                model.require_backward_grad_sync = i == len(micro_batches) - 1
            with run.ctx:
                micro_loss = model(micro_x, micro_y)[1] * (len(micro_x) / len(x))
            micro_loss.backward()
            loss += micro_loss.detach()

        lr = learning_rate(run.iter_num, config)
        run.update(loss, lr)
        run.iter_num += 1
        stop = over_ranks(len(caught)) > 0                   # all ranks stop after the same iter

        last = run.iter_num == config.max_iters
        if last or run.iter_num % config.log_interval == 0:
            run.progress(lr)
        if last or (config.eval_interval and run.iter_num % config.eval_interval == 0):
            run.validate()

    if not stop:
        return 0
    run.save()
    number = (caught + [signal.SIGTERM])[0]                  # ranks that were not told
    print0(f"signal {number}: saved iter {run.iter_num:,}; continue with --resume --out_dir {run.out}", flush=True)
    return 128 + number


def main(argv=None):
    try:
        run = Run(argv)
    except (ValueError, OSError) as e:
        data.die(e)
    try:
        status = train(run)
    finally:
        run.log_file.close()
    leave_ranks(status)
    if status:
        raise SystemExit(status)


if __name__ == "__main__":
    main()
