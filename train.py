"""Train a decoder under one positional scheme:  python train.py --pos accum_qkv

Runs on a bare laptop (preset tiny: bytes of the standard library, a few minutes on two cores), on CUDA, and
on several ranks under torchrun. Every field of GPTConfig and TrainConfig is a flag; a preset sets several at
once, flags given by hand win. --resume continues a run exactly.
"""
import argparse
import json
import math
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import data
from model import GPT, GPTConfig, is_positional, load_model, option
from transport import SCHEMES

try:
    import fcntl
except ImportError:          # on Windows nothing keeps two runs out of one folder
    fcntl = None

PRESETS = {
    "tiny": dict(n_layer=4, n_head=2, n_embd=128, data="stdlib", block_size=256, batch_size=16,
                 max_iters=1200, learning_rate=3e-3, min_lr=3e-4, warmup_iters=50),
    "small": dict(n_layer=8, n_head=6, n_embd=384, data="stdlib", block_size=512, batch_size=32,
                  max_iters=2000, learning_rate=1e-3, min_lr=1e-4, warmup_iters=100),
    "paper": dict(n_layer=16, n_head=12, n_embd=768, data="openwebtext", block_size=512, batch_size=64,
                  gradient_accumulation_steps=16, max_tokens=3e9, eval_iters=100,
                  learning_rate=6e-4, min_lr=6e-5, warmup_iters=500),
}
# Dense bfloat16 peak in TFLOP/s, from the data sheets, by the whole name torch.cuda.get_device_name gives
# but for "NVIDIA ". A device of another name (a laptop, a slice of one) shows no MFU rather than a wrong one.
PEAK_TFLOPS = {
    "B200": 2250, "GH200 480GB": 989, "H200": 989, "H200 NVL": 835, "H800": 989, "H800 PCIe": 756,
    "H100 80GB HBM3": 989, "H100 PCIe": 756, "H100 NVL": 835, "L40S": 362, "L40": 181, "L4": 121,
    "A100-SXM4-40GB": 312, "A100-SXM4-80GB": 312, "A100-PCIE-40GB": 312, "A100 80GB PCIe": 312,
    "A800-SXM4-80GB": 312, "A800 80GB PCIe": 312, "GeForce RTX 4090": 165, "GeForce RTX 3090": 71,
}
EVAL_SEED, EVAL_BATCH = 2 ** 32 - 1, 16      # validation is the same whatever a run's seed and micro-batches


# -----------------------------------------------------------------------------------------------------------
# Configuration

@dataclass
class TrainConfig:
    preset: str = option("auto", "tiny, small, paper; auto is paper with CUDA and OpenWebText, else tiny")
    data: str = option("stdlib", "data set: a name under data/, or a folder with train.bin and val.bin")
    out_dir: str = option("", "where checkpoint and log go (empty: out/PRESET-POS, for other seeds -seedN)")
    block_size: int = option(256, "training context in tokens; nothing in the model is sized by it")
    batch_size: int = option(32, "sequences per micro-batch")
    gradient_accumulation_steps: int = option(1, "micro-batches per iter, over all processes")
    max_iters: int = option(1000, "iters in all")
    max_tokens: float = option(0, "tokens to train on in all, in place of max_iters (0: as max_iters says)")
    learning_rate: float = option(2e-3, "peak of the cosine schedule")
    min_lr: float = option(2e-4, "its end")
    warmup_iters: int = option(50, "iters of linear warm-up")
    weight_decay: float = option(0.1, "on matrices, but not on positional parameters")
    beta1: float = option(0.9, "AdamW")
    beta2: float = option(0.95, "AdamW")
    grad_clip: float = option(1.0, "largest gradient norm (0: no clipping)")
    eval_interval: int = option(250, "iters between validations and saves (0: only at the end)")
    eval_iters: int = option(20, f"validation batches of {EVAL_BATCH} sequences")
    log_interval: int = option(10, "iters between log lines")
    seed: int = option(1, "of initial weights, of random angle tables and of the order of the data")
    device: str = option("auto", "cpu, cuda, cuda:1, ...; auto is cuda where there is one")
    dtype: str = option("auto", "bfloat16 (autocast), float32; auto is bfloat16 where that is fast")
    compile: bool = option(None, "torch.compile; default on CUDA only")

    def __post_init__(self):
        types = {str: [str], int: [int], float: [float, int], bool: [bool, type(None)]}
        from_one = ("block_size", "batch_size", "gradient_accumulation_steps", "max_iters", "eval_iters",
                    "log_interval")
        for f in fields(self):
            value, low = getattr(self, f.name), int(f.name in from_one)
            if type(value) not in types[f.type]:
                raise ValueError(f"{f.name} must be of type {f.type.__name__}, not {type(value).__name__}")
            if f.type in (int, float) and not low <= value < 2 ** 62:
                raise ValueError(f"{f.name} must be a number from {low} to 2^62, got {value}")
        if max(self.beta1, self.beta2) >= 1:
            raise ValueError(f"beta1 and beta2 must be less than 1, got {self.beta1} and {self.beta2}")
        if self.learning_rate == 0 or self.min_lr > self.learning_rate:
            raise ValueError(f"learning_rate must be above 0 and at least min_lr {self.min_lr}, "
                             f"got {self.learning_rate}")
        if self.max_tokens:
            tokens_per_iter = self.batch_size * self.gradient_accumulation_steps * self.block_size
            self.max_iters = math.ceil(self.max_tokens / tokens_per_iter)


def parse_args(argv=None):
    """-> (values of a new run, those of them given by hand, resume)."""
    schemes = "\n".join(f"  {name:<16} {scheme.kind}: {scheme.about}" for name, scheme in SCHEMES.items())
    parser = data.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"schemes for --pos (ROTATION, BIAS or ROTATION+BIAS):\n{schemes}")
    parser.add_argument(
        "--resume", action="store_true",
        help="continue the run in --out_dir; flags given with it hold from there on, its model and seed stay")
    for cls in (GPTConfig, TrainConfig):
        group = parser.add_argument_group(cls.__name__)
        for f in fields(cls):
            kind = {"action": argparse.BooleanOptionalAction} if f.type is bool else {"type": f.type}
            text = f"{f.metadata['help']} (default: {f.default})".replace("%", "%%")
            group.add_argument(f"--{f.name}", default=argparse.SUPPRESS, help=text, **kind)
    given = vars(parser.parse_args(argv))
    resume = given.pop("resume")
    if "max_iters" in given:
        given.setdefault("max_tokens", 0)

    preset = given.get("preset", "auto")
    if preset == "auto":
        ready = torch.cuda.is_available() and Path("data/openwebtext/train.bin").exists()
        preset, why = ("paper", "a GPU and") if ready else ("tiny", "no GPU or no")
        print0(f"preset {preset}: {why} data/openwebtext here; others by --preset {', '.join(PRESETS)}")
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset}: {', '.join(PRESETS)}")
    values = {"pos": GPTConfig.pos, "seed": TrainConfig.seed} | PRESETS[preset] | given | {"preset": preset}
    name = f"{preset}-{values['pos']}" + (f"-seed{values['seed']}" if values["seed"] != 1 else "")
    values["out_dir"] = given.get("out_dir") or f"out/{name}"
    return values, given, resume


def configs(values):
    """-> GPTConfig and TrainConfig with these values, defaults for the others."""
    def pick(cls):
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})
    return pick(GPTConfig), pick(TrainConfig)


def resumed_values(given, saved, ckpt):
    """A checkpoint's values under the flags given. ValueError: a foreign one, another model or seed."""
    types = {"train_config": dict, "optimizer": dict, "iter_num": int, "best_val_loss": (float, type(None))}
    whole = all(isinstance(saved.get(name, ()), kind) for name, kind in types.items())
    if not whole or saved["train_config"].keys() != {f.name for f in fields(TrainConfig)}:
        raise ValueError(f"{ckpt} does not hold what --resume needs: choose another --out_dir")
    TrainConfig(**saved["train_config"])                     # refuses values that are none
    old = saved["model_config"] | saved["train_config"]
    for name in [*saved["model_config"], "seed"]:
        if given.get(name, old[name]) != old[name]:
            raise ValueError(f"{ckpt} was trained with {name} {old[name]}, not {given[name]}: leave --{name} "
                             "out, or choose another --out_dir")
    return old | given | {"preset": old["preset"]}


# -----------------------------------------------------------------------------------------------------------
# Device and ranks

def pick_device(name):
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        if torch.zeros(1, device=name).device.type in ("cpu", "cuda"):
            return name
    except (RuntimeError, AssertionError):                   # no such device here
        pass
    raise ValueError(f"--device {name} cannot be used here: cpu, or, where there is one, cuda or cuda:N")


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
        print(*words, **how, flush=True)


def join_ranks(device):
    """Under torchrun: join the process group, with a GPU for each rank. -> device, rank, world size."""
    rank, world_size = ranks()
    if world_size > 1 and device in ("auto", "cuda") and torch.cuda.is_available():
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    device = pick_device(device)
    if world_size > 1:
        if "cuda" in device:
            torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if "cuda" in device else "gloo")
    return device, rank, world_size


def over_ranks(value):
    """Sum of a number over all ranks; the hosts agree on it, whatever their devices are doing."""
    if ranks()[1] == 1:
        return value
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


def leave_ranks(code=0):
    """Under torchrun, end this rank when all are done; not gloo's threads, which abort one time in ten."""
    if ranks()[1] > 1:
        dist.barrier()
        sys.stdout.flush()
        os._exit(code)


# -----------------------------------------------------------------------------------------------------------
# Optimizer, schedule, speed

def make_optimizer(model, config):
    """Fused AdamW. Matrices decay, but no positional parameters: that would pull angles to zero."""
    groups = [{"params": [], "weight_decay": config.weight_decay}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in model.named_parameters():
        plain = parameter.dim() < 2 or is_positional(name)
        groups[plain]["params"].append(parameter)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True)


def load_moments(optimizer, saved):
    """Take AdamW's moments, not its settings, from a state_dict. ValueError: they do not fit the model."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    try:
        for i, parameter in enumerate(parameters):
            moments = saved["state"][i]
            if not moments["exp_avg"].shape == moments["exp_avg_sq"].shape == parameter.shape:
                raise ValueError
            moments["step"].item()
        optimizer.load_state_dict(optimizer.state_dict() | {"state": saved["state"]})
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError):
        raise ValueError("the checkpoint's optimizer state does not fit its model: choose another --out_dir")


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
    """Model FLOPs utilisation: the fraction of the peak of a device of this name; None if that is unknown."""
    peak = PEAK_TFLOPS.get(name.removeprefix("NVIDIA "))
    return tokens_per_second * flops_per_token(model, block_size) / (peak * 1e12) if peak else None


# -----------------------------------------------------------------------------------------------------------
# A run

def open_log(out):
    """A run's log, this process's own while it lives. ValueError: another run is using the folder."""
    if ranks()[0]:
        return open(os.devnull, "a+b", buffering=0)
    out.mkdir(parents=True, exist_ok=True)
    log_file = open(out / "log.jsonl", "a+b", buffering=0)
    try:
        if fcntl:
            fcntl.flock(log_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"another training runs in {out}: wait for its end, or choose another --out_dir")
    except OSError:
        pass                                                 # a file system that has no locks
    return log_file


def belongs(line, iter_num):
    """Can this line of a log be read, and is it from no later than iter_num?"""
    try:
        return json.loads(line)["iter_num"] <= iter_num
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def to_device(arrays, device):
    """int64 arrays -> tensors on the device, copied while it computes."""
    tensors = [torch.from_numpy(np.ascontiguousarray(a)) for a in arrays]
    if "cuda" in device:
        tensors = [t.pin_memory() for t in tensors]
    return [t.to(device, non_blocking=True) for t in tensors]


class Run:
    """A training run: what it holds, and what is done with it."""

    def __init__(self, argv=None):
        """From flags and, with --resume, a checkpoint. Bad input: ValueError or OSError, no file changed."""
        values, given, resume = parse_args(argv)
        self.out = Path(values["out_dir"])
        self.ckpt = ckpt = self.out / "ckpt.pt"
        self.iter_num, self.best_val_loss, self.log_file, saved = 0, None, None, None
        if ckpt.exists():
            if not resume:
                raise ValueError(f"{ckpt} exists: --resume continues it; or choose another --out_dir")
            self.log_file = open_log(self.out)               # before ckpt is read: another run may change it
        if resume:
            model, saved = load_model(ckpt)
            values = resumed_values(given, saved, ckpt) | {"out_dir": values["out_dir"]}
            self.iter_num, self.best_val_loss = saved["iter_num"], saved["best_val_loss"]

        self.model_config, self.config = configs(values)
        self.find_device()
        self.open_data(saved, values.get("vocab_size"))
        if not resume:
            torch.manual_seed(self.config.seed)
            model = GPT(self.model_config)
        self.raw_model = model.to(self.device).train()
        self.optimizer = make_optimizer(model, self.config)
        if resume:
            load_moments(self.optimizer, saved["optimizer"])
        self.log_file = self.log_file or open_log(self.out)

    def find_device(self):
        """Join the other ranks. An iter's sequences are those of all ranks."""
        config, world_size = self.config, ranks()[1]
        self.sequences = config.batch_size * config.gradient_accumulation_steps
        if self.sequences % world_size:
            raise ValueError(f"{config.batch_size} x {config.gradient_accumulation_steps} sequences per iter "
                             f"cannot be shared by {world_size} ranks")
        self.device, self.rank, self.world_size = join_ranks(config.device)
        self.dtype = pick_dtype(config.dtype, self.device)
        self.ctx = autocast(self.device, self.dtype)

    def open_data(self, saved, vocab_size):
        """saved: the checkpoint, if any. vocab_size: the model's, if settled; else it is the data's."""
        config = self.config
        if self.rank == 0:
            data.find(config.data)                           # one rank prepares the default corpus
        over_ranks(0)                                        # while the others wait
        self.folder = folder = data.find(config.data)
        self.encoding, self.vocab_size = data.describe(folder)
        if saved:
            data.check_encoding(folder, saved["encoding"])
        vocab_size = vocab_size or self.vocab_size
        if vocab_size < self.vocab_size:
            raise ValueError(f"{folder} has {self.vocab_size} token ids, more than vocab_size {vocab_size}")
        self.model_config = replace(self.model_config, vocab_size=vocab_size)
        self.train_tokens = data.load(folder, "train", config.block_size + 1, self.vocab_size)
        self.val_tokens = data.load(folder, "val", config.block_size + 1, self.vocab_size)

    def start(self):
        """Compile, wrap, and go on with the log: what it holds from after the checkpoint is dropped."""
        config, device, on_cuda = self.config, self.device, "cuda" in self.device
        # TF32 for a float32 run; under autocast only the transport multiplies in float32, and needs the bits
        torch.set_float32_matmul_precision("high" if self.dtype == torch.float32 else "highest")
        compiled = (on_cuda if config.compile is None else config.compile) and can_compile(device)
        self.model = torch.compile(self.raw_model) if compiled else self.raw_model
        if self.world_size > 1:
            torch._dynamo.config.optimize_ddp = False        # older releases cannot split a checkpointed loss
            self.model = DistributedDataParallel(self.model, device_ids=[device] if on_cuda else None)
        self.latest = torch.zeros(3, device=device)          # iter, loss and gradient norm
        self.loss_sum = torch.zeros((), device=device)
        self.optimizer.found_inf = torch.zeros((), device=device)
        self.timed, self.started = self.iter_num, time.perf_counter()

        if self.log_file.seek(0, os.SEEK_END):
            self.log_file.seek(0)
            kept = [line for line in self.log_file if self.iter_num and belongs(line, self.iter_num)]
            self.log_file.truncate(0)
            self.log_file.writelines(kept)
        total, positional = self.raw_model.num_params()
        self.where = device_name(device)
        how = f"{self.world_size} x {self.where}, {str(self.dtype)[6:]}{', compiled' if compiled else ''}"
        print0(f"{self.model_config.pos}: {total:,} parameters ({positional:,} positional) on {how}")
        print0(f"{self.folder} -> {self.out}: {self.sequences * config.block_size:,} tokens per iter, "
               f"context {config.block_size}")
        self.log(iter_num=self.iter_num, model_config=asdict(self.model_config), train_config=asdict(config),
                 params=total, device=how, torch=torch.__version__)

    def log(self, **entry):
        self.log_file.write(json.dumps(entry).encode() + b"\n")

    def batch(self):
        """-> x, y (sequences of this rank, block_size): the tokens of this iter."""
        arrays = data.batch(self.train_tokens, self.iter_num, self.config.seed, self.rank, self.world_size,
                            batch_size=self.sequences, block_size=self.config.block_size)
        return to_device(arrays, self.device)

    def update(self, loss, lr):
        """One AdamW update with the gradients there are; the host does not wait for it.

        From the first loss or gradient that is not finite on, the device skips all updates (found_inf is
        AdamW's own switch for that), and self.latest stays at the culprit, for check() to find.
        """
        optimizer = self.optimizer
        if self.world_size > 1:
            dist.all_reduce(loss)
            loss /= self.world_size
        norm = torch.nn.utils.clip_grad_norm_(self.raw_model.parameters(), self.config.grad_clip or math.inf)
        latest = torch.stack((torch.full_like(loss, self.iter_num + 1), loss, norm))
        self.latest = torch.where(optimizer.found_inf > 0, self.latest, latest)
        optimizer.found_inf = 1.0 - self.latest.isfinite().all().float()
        self.loss_sum += loss
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def check(self):
        """Wait for the device -> the latest gradient norm. Raises ArithmeticError if one was not finite."""
        iter_num, loss, norm = self.latest.tolist()
        if not math.isfinite(loss + norm):
            raise ArithmeticError(f"the loss at iter {iter_num:,.0f} is {loss}, its gradient norm {norm}")
        return norm

    def progress(self, lr):
        """Print and log where the training is."""
        norm, done, max_iters = self.check(), self.iter_num, self.config.max_iters
        iters = done - self.timed
        loss = self.loss_sum.item() / iters
        seconds = (time.perf_counter() - self.started) / iters
        rate = self.sequences * self.config.block_size / seconds
        used = mfu(self.raw_model, self.config.block_size, rate / self.world_size, self.where)
        eta = data.clock(seconds * (max_iters - done))
        mfu_text = f"MFU {used:.1%} | " if used else ""
        print0(f"iter {done:,}/{max_iters:,} ({done / max_iters:.0%}) | loss {loss:.4f} | lr {lr:.1e} | "
               f"{1000 * seconds:.0f} ms | {rate:,.0f} tok/s | {mfu_text}ETA {eta}")
        self.log(iter_num=done, loss=loss, lr=lr, grad_norm=norm, ms=1000 * seconds, tokens_per_second=rate)
        self.loss_sum.zero_()
        self.timed, self.started = done, time.perf_counter()

    @torch.no_grad()
    def validate(self):
        """-> mean loss (nats per token) over eval_iters fixed batches, shared out over ranks."""
        config, tokens = self.config, self.val_tokens
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for i in range(self.rank, config.eval_iters, self.world_size):
            arrays = data.batch(tokens, i, EVAL_SEED, batch_size=EVAL_BATCH, block_size=config.block_size)
            with self.ctx:
                total += self.raw_model(*to_device(arrays, self.device))[1]
        return over_ranks(total.item()) / config.eval_iters

    def evaluate(self):
        """Validate, save and log the result; that is no part of the time of an iter."""
        self.check()
        paused = time.perf_counter()
        loss = self.validate()
        if not math.isfinite(loss):
            raise ArithmeticError(f"the validation loss at iter {self.iter_num:,} is {loss}")
        self.best_val_loss = min(loss, self.best_val_loss or loss)
        self.save()
        perplexity = math.exp(min(loss, 700))
        print0(f"iter {self.iter_num:,}: validation loss {loss:.4f}, perplexity {perplexity:.2f}, "
               f"saved {self.ckpt}")
        self.log(iter_num=self.iter_num, val_loss=loss, best_val_loss=self.best_val_loss)
        self.started += time.perf_counter() - paused

    def save(self):
        """Write the checkpoint, whole or not at all, on one rank."""
        self.check()
        if self.rank:
            return
        saved = {
            "model": self.raw_model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "iter_num": self.iter_num, "best_val_loss": self.best_val_loss,
            "model_config": asdict(self.model_config), "train_config": asdict(self.config),
            "encoding": self.encoding, "vocab_size": self.vocab_size,
        }
        with data.written_whole(self.ckpt, "wb", "partial") as f:
            torch.save(saved, f)


def catch_signals():
    """-> a list that will hold the first SIGINT or SIGTERM; a second one kills."""
    caught = []

    def on_signal(number, frame):
        caught.append(number)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    return caught


# -----------------------------------------------------------------------------------------------------------
# The training loop

def train(run):
    """Train until max_iters or a signal; run.iter_num counts the updates done. -> exit status."""
    config, model = run.config, run.model
    caught, stop = catch_signals(), False
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
            run.evaluate()

    if not stop:
        return 0
    run.save()
    number = (caught + [signal.SIGTERM])[0]                  # only the rank that was told knows the number
    print0(f"signal {number}: saved iter {run.iter_num:,}; continue with --resume --out_dir {run.out}")
    return 128 + number


def main(argv=None):
    try:
        run = Run(argv)
    except (ValueError, OSError) as e:
        data.die(e)
    try:
        run.start()
        if run.iter_num >= run.config.max_iters:
            print0(f"nothing to do: {run.ckpt} is at iter {run.iter_num:,}; --max_iters asks for more")
        status = train(run)
    except (ArithmeticError, OSError) as e:                  # a number that is not finite, or a full disk
        show = print0 if isinstance(e, ArithmeticError) else print
        show(f"error: {e}; {run.out} is as it was at the last save", file=sys.stderr)
        raise SystemExit(1)
    finally:
        run.log_file.close()
    leave_ranks(status)
    if status:
        raise SystemExit(status)


if __name__ == "__main__":
    main()
