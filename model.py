"""The decoder: pre-norm, no biases, GELU MLP, tied embedding and head. The defaults of GPTConfig are the
paper's model.

No size depends on the training context. The positional scheme comes in by Transport, shared in GPT and a
layer's own in Attention, by the scale of q, and by `attend`. See transport.py.
"""
import math
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch._functorch.config as functorch_config
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from transport import Transport, attend, parse

# What this cache of torch.compile keeps of graphs that end in views is garbage a run later (PyTorch 2.13)
functorch_config.enable_autograd_cache = False

LOGITS_AT_ONCE = 2 ** 26   # logits in memory at a time (256 MB in fp32): 1,334 rows of the GPT-2 vocabulary
IGNORED = -100             # a target that has no loss, as in F.cross_entropy
LOGITS_IN_CACHE = 2 ** 22  # on CPU, where no gradient is asked for: half the time


def option(default, text):
    return field(default=default, metadata={"help": text})


@dataclass
class GPTConfig:
    pos: str = option("accum_qkv", "positional scheme: ROTATION, BIAS, SCALE, or several joined by +")
    n_layer: int = option(16, "layers")
    n_head: int = option(12, "attention heads")
    n_embd: int = option(768, "width")
    vocab_size: int = option(50257, "token ids (the embedding has a multiple of 64 rows)")
    sigma: float = option(0.3, "spread of random and initial learned step angles (radians)")
    rope_base: float = option(10000.0, "RoPE's base")
    alibi_scale: float = option(1.0, "factor of ALiBi's slopes: smaller ones look further back")
    train_context: int = option(512, "where logn and ssmax have scale 1 (train.py: block_size)")
    qk_norm: bool = option(False, "RMS-normalise queries and keys (before transport, no gain)")
    out_norm: bool = option(False, "RMS-normalise every head's output, then gate it by the layer's input")

    def __post_init__(self):
        parse(self.pos)
        for name in ("n_layer", "n_head", "n_embd", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd {self.n_embd} is not divisible by n_head {self.n_head}")
        if self.train_context < 2:
            raise ValueError(f"train_context must be at least 2, got {self.train_context}")
        if not 0 <= self.sigma < math.inf:
            raise ValueError(f"sigma must be a number from 0 on, got {self.sigma}")
        for name in ("rope_base", "alibi_scale"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number above 0, got {getattr(self, name)}")


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head, self.qk_norm, self.out_norm = config.n_head, config.qk_norm, config.out_norm
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.transport = Transport(config, shared=False)
        if config.out_norm:
            self.c_gate = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def inputs(self, x, idx, shared, past=None):
        """What `attend` takes: q, k, v (B, H, T, d), the transport of keys, that of values, and the key
        bias."""
        q, k, v = self.c_attn(x).unflatten(-1, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)
        if self.qk_norm:
            q, k = F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])
        given = shared | self.transport(idx, x, past)
        if "scale" in given:
            q = (q * given["scale"][..., None]).to(q.dtype)
        return q, k, v, given.get("rotation"), given.get("values"), given.get("bias")

    def output(self, y, x):
        """What heads read, y (B, H, T, d), back to the width: (B, T, C)."""
        if self.out_norm:
            gate = torch.sigmoid(self.c_gate(x)).unflatten(-1, (self.n_head, -1)).transpose(1, 2)
            y = F.rms_norm(y, y.shape[-1:]) * gate
        return self.c_proj(y.transpose(1, 2).flatten(2))

    def forward(self, x, idx, shared, past=None):
        y = attend(*self.inputs(x, idx, shared, past), past)
        return self.output(y, x)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=False)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(config.n_embd, 4 * config.n_embd, bias=False),
            nn.GELU(),
            nn.Linear(4 * config.n_embd, config.n_embd, bias=False),
        )

    def forward(self, x, idx, shared, past=None):
        x = x + self.attn(self.ln_1(x), idx, shared, past)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.n_ids = config.vocab_size                      # ids that `generate` may draw: those of the data
        rows = -(-config.vocab_size // 64) * 64             # a multiple of 64 is faster
        self.wte = nn.Embedding(rows, config.n_embd)
        self.transport = Transport(config, shared=True)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, bias=False)
        self.init_weights()

    def init_weights(self):
        """GPT-2's 0.02 at its width, fan-in scaling at others; less for residual projections."""
        std = 0.02 * math.sqrt(768 / self.config.n_embd)
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                residual = name.endswith(("c_proj", "mlp.2"))
                smaller = math.sqrt(2 * self.config.n_layer) if residual else 1.0
                nn.init.normal_(module.weight, std=std / smaller)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)
        for module in self.modules():
            if module is not self and hasattr(module, "init_weights"):
                module.init_weights()

    def num_params(self):
        """-> (all parameters, those of the positional scheme); frozen angle tables do not count."""
        sizes = {name: p.numel() for name, p in self.named_parameters()}
        return sum(sizes.values()), sum(n for name, n in sizes.items() if is_positional(name))

    def new_past(self):
        """What `hidden` and `forward` fill with keys, values and transports: a dict a layer, a shared one."""
        return [{} for _ in range(len(self.h) + 1)]

    def hidden(self, idx, past=None):
        """Token ids (B, T) -> final normalised hidden states (B, T, C).

        With a past, idx go on from the tokens it holds. Raises ValueError, before the past is touched, if
        there are no tokens, or their batch is another than the past's.
        """
        if idx.dim() != 2 or idx.numel() == 0:
            raise ValueError(f"token ids must be (B, T), at least one, got {tuple(idx.shape)}")
        if past and past[0] and past[0]["k"].size(0) != idx.size(0):
            batch = past[0]["k"].size(0)
            raise ValueError(f"token ids must be ({batch}, T), as in the past, got {tuple(idx.shape)}")

        x = self.wte(idx)
        *layers, shared_past = past or [None] * (len(self.h) + 1)
        shared = self.transport(idx, x, shared_past)
        for block, layer_past in zip(self.h, layers):
            x = block(x, idx, shared, layer_past)
        return self.ln_f(x)

    def nll(self, idx, targets, past=None):
        """Negative log-likelihood (nats) of every target: idx, targets (B, T) -> (B, T), float32 or wider.

        At most LOGITS_AT_ONCE logits are in memory, or LOGITS_IN_CACHE, also in training, which computes them
        again on the way back.
        """
        x, y = self.hidden(idx, past).flatten(0, 1), targets.flatten()
        cached = x.device.type == "cpu" and not torch.is_grad_enabled()
        rows = max(1, (LOGITS_IN_CACHE if cached else LOGITS_AT_ONCE) // self.wte.num_embeddings)
        if len(y) <= rows:
            nll = self.rows_nll(x, y)
        elif torch.is_grad_enabled():
            nll = in_pieces(lambda *a: checkpoint(self.rows_nll, *a, use_reentrant=False), x, y, rows)
        else:
            nll = in_pieces_not_compiled(self.rows_nll, x, y, rows)
        return nll.view(targets.shape)

    def rows_nll(self, x, y):
        logits = F.linear(x, self.wte.weight)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, y, reduction="none", ignore_index=IGNORED)

    def forward(self, idx, targets=None, past=None):
        """-> (logits, loss): with targets (None, mean loss of those that are not -100), else (those of the
        last position, (B, 1, rows of the embedding), None)."""
        if targets is not None:
            nll = self.nll(idx, targets, past)
            return None, nll.sum() / (targets != IGNORED).sum()
        return F.linear(self.hidden(idx, past)[:, -1:], self.wte.weight), None

    @torch.no_grad()
    def generate(self, idx, n, temperature=1.0, top_k=0):
        """Append n sampled tokens to idx (B, T) -> (B, T + n), O(T) work a token.

        Ids beyond the data's are never drawn. temperature 0 takes the likeliest token; top_k 0 is off. Raises
        ValueError on an empty prompt or a number below zero.
        """
        if n < 0 or top_k < 0 or not 0 <= temperature < math.inf:
            raise ValueError(f"n {n}, top_k {top_k}, temperature {temperature}: all must be finite, none < 0")

        past, new = self.new_past(), idx
        for _ in range(n):
            logits = self(new, past=past)[0][:, -1, :self.n_ids].double()
            if top_k:
                least = logits.topk(min(top_k, self.n_ids)).values[:, -1:]
                logits[logits < least] = -math.inf
            if temperature > 0:
                logits -= logits.amax(-1, keepdim=True)     # a tiny temperature makes no inf - inf
                new = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1)
            else:
                new = logits.argmax(-1, keepdim=True)
            idx = torch.cat((idx, new), dim=1)
        return idx


def in_pieces(f, x, y, rows):
    """f of `rows` rows of x and y at a time, joined."""
    return torch.cat([f(*piece) for piece in zip(x.split(rows), y.split(rows))])


in_pieces_not_compiled = torch.compiler.disable(in_pieces)  # it would unroll the loop, anew for every length


def is_positional(name):
    """Does the parameter `name` belong to the positional scheme? (No weight decay there.)"""
    return "transport." in name


def load_model(path, device="cpu"):
    """Read a checkpoint of train.py -> (GPT in eval mode on device, the dict that was saved).

    Raises ValueError, naming the file, if there is none, or it is truncated, or of something else.
    """
    try:
        with warnings.catch_warnings():                      # torch says more than one line of foreign files
            warnings.simplefilter("ignore")
            saved = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"no checkpoint at {path}: train one with train.py --out_dir {Path(path).parent}")
    except Exception as e:                                    # whatever a damaged file raises
        raise ValueError(f"{path} is not a readable checkpoint ({first_line(e)})")
    try:
        if not isinstance(saved, dict):
            raise TypeError(f"it holds a {type(saved).__name__}")
        model = GPT(GPTConfig(**saved["model_config"]))
        model.load_state_dict(saved["model"])
        model.n_ids = min(saved["vocab_size"], model.config.vocab_size)
        for name in ("block_size", "data", "seed"):
            saved["train_config"][name]                       # KeyError where it is missing
        for name in ("iter_num", "encoding"):
            saved[name]
    except Exception as e:
        raise ValueError(f"{path} is not a checkpoint of this model ({first_line(e)})")
    return model.to(device).eval(), saved


def first_line(error):
    return (str(error).splitlines() or [type(error).__name__])[0][:120]
