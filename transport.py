"""Positions as transport: every scheme of "Why Do Accumulated Transformations Extrapolate?" (arXiv 2606.24975).

Attention compares a query at i with a key at j after carrying the key along the path of tokens from j to i. Schemes differ
in the step that each token contributes and in what is carried (keys, or keys and values); all of them run as
encode -> one causal F.scaled_dot_product_attention -> decode. This file needs torch alone: copy it, or any function of it.

Conventions (tested in test_all.py)
  path    from source j to query i is (j, i]: the source's own step is excluded, the query's included.
          P_{j->i} = M_i ... M_{j+1} = C_i C_j^{-1},  C_t = M_t C_{t-1}  (the new step multiplies on the left),  P_{i->i} = I.
  pairs   are half-split: channel c turns together with channel c + d/2 (Llama and GPT-NeoX checkpoints).
  sign    is RoPE's: q, k and, where carried, v are rotated by +phase, the output is rotated back by -phase.
          RoPE is the special case of a constant step, ALiBi of a constant forget gate, NoPE of a zero step.
  phase   cumulative sum of step angles (radians), summed and wrapped to (-pi, pi] in float64, then rounded to float32.
  shapes  q, k, v are (B, H, T, d); phases (B|1, H|1, T, d/2); key biases (B|1, H, T), added after the 1/sqrt(d) scale.
  norms   on q and k, if any, come before transport: a learnable gain after it would break the path law.
"""
import math
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

BIAS_CHANNELS = 8   # extra key channels that hold a bias; keeps the head dim a multiple of 8, as fused kernels want
ANGLE_SEED = 42     # random tables come from a generator of their own: the same on every rank and for every --seed


class Scheme(NamedTuple):
    kind: str       # "rotation" or "bias"
    step: str       # where the step M_t comes from
    values: bool    # are values carried too?
    about: str


SCHEMES = {
    "nope":        Scheme("rotation", "none", False, "identity step: no positions (control)"),
    "rope":        Scheme("rotation", "constant", False, "constant angle per block (the baseline)"),
    "rope_qkv":    Scheme("rotation", "constant", True, "constant angle per block, values too (control)"),
    "random_qk":   Scheme("rotation", "random", False, "frozen random angle per token id and block"),
    "random_qkv":  Scheme("rotation", "random", True, "frozen random angle per token id and block, values too"),
    "accum_qk":    Scheme("rotation", "table", False, "learned angle per token id and block"),
    "accum_qkv":   Scheme("rotation", "table", True, "learned angle per token id and block, values too"),
    "hidden_qk":   Scheme("rotation", "hidden", False, "learned angle from the layer's input"),
    "hidden_qkv":  Scheme("rotation", "hidden", True, "learned angle from the layer's input, values too"),
    "alibi":       Scheme("bias", "constant", False, "key bias slope_h * j (explicit far-mass control)"),
}


def parse(pos):
    """Split a scheme name `ROTATION`, `BIAS` or `ROTATION+BIAS` into (rotation, bias); bias is None where there is none.

    Raises ValueError with the list of schemes for any other name.
    """
    rotation, plus, bias = pos.partition("+")
    if not plus and rotation in SCHEMES and SCHEMES[rotation].kind == "bias":
        rotation, bias = "nope", rotation
    known = lambda name, kind: name in SCHEMES and SCHEMES[name].kind == kind
    if not known(rotation, "rotation") or (plus or bias) and not known(bias, "bias"):
        rotations, biases = (", ".join(n for n, s in SCHEMES.items() if s.kind == k) for k in ("rotation", "bias"))
        raise ValueError(f"unknown scheme '{pos}'; rotations: {rotations}; biases: {biases}; "
                         "'+' joins a rotation and a bias, as in accum_qkv+alibi")
    return rotation, bias or None


# ---------------------------------------------------------------------------------------------------------------------
# Functions to copy

def accumulate(steps, dtype=torch.float32):
    """Phase of every position: the running sum of step angles, wrapped to (-pi, pi].

    steps (..., T, d/2) radians, any float dtype -> (..., T, d/2) in `dtype`. Sum and wrap are in float64: a float32 sum is
    off by up to 1e-2 rad at T = 65,536, and steps in bfloat16 are useless whatever the sum (see the README).
    """
    phase = steps.cumsum(-2, dtype=torch.float64)
    turns = torch.ceil(phase.detach() * (0.5 / math.pi) - 0.5)
    return phase.sub(turns, alpha=2 * math.pi).to(dtype)


def cos_sin(phase):
    """Phase (radians) -> the pair (cos, sin), which `rotate` and `attend` take in its place: compute it once, use it often."""
    return phase if isinstance(phase, tuple) else (phase.cos(), phase.sin())


def rotate(x, phase):
    """Turn every channel pair (c, c + d/2) of x by its phase; RoPE when phase = accumulate(rope_steps(T, d)).

    x (B, H, T, d), phase (B|1, H|1, T, d/2) in radians or its `cos_sin` pair -> (B, H, T, d) in x's dtype, whatever the
    phase's; products are taken in the wider of the two. Raises ValueError on shapes that do not fit.
    """
    cos, sin = cos_sin(phase)
    if x.size(-1) != 2 * cos.size(-1) or x.size(-2) != cos.size(-2):
        raise ValueError(f"rotate: x {tuple(x.shape)} needs a phase (B|1, H|1, {x.size(-2)}, {x.size(-1)}/2), "
                         f"got {tuple(cos.shape)}")
    x1, x2 = x.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * cos), dim=-1).to(x.dtype)


def rope_steps(T, d, base=10000.0, device=None):
    """RoPE as steps: the same angles base^(-2c/d) at every position (Su et al., arXiv 2104.09864). -> (T, d/2) float64."""
    if d % 2:
        raise ValueError(f"rope_steps: the head dim must be even, got {d}")
    angle = base ** (-torch.arange(0, d, 2, dtype=torch.float64, device=device) / d)
    return angle.expand(T, d // 2)


def alibi_slopes(n_head, device=None):
    """ALiBi's published slopes (Press et al., arXiv 2108.12409, get_slopes): 2^(-8h/n) for a power of two n; otherwise those
    of the power of two below n, then every second one of the power of two above. -> (n_head,) float64."""
    n = 2 ** int(math.log2(n_head))
    slopes = [2 ** (-8 * h / n) for h in range(1, n + 1)] + [2 ** (-4 * h / n) for h in range(1, 2 * (n_head - n), 2)]
    return torch.tensor(slopes, dtype=torch.float64, device=device)


def bias_channels(key_bias, d):
    """Write an additive key bias as extra channels: q gets the constant `e`, k gets `parts`, and e * sum(parts) / sqrt(d) = bias.

    key_bias (B|1, H, T), any float dtype, best float64 -> float e, parts (B|1, H, T, 8) float64 that bfloat16 holds exactly.
    Softmax is blind to a constant per row, so the bias -m(i - j) may be m*j on the key alone; it is centred on the last key,
    where precision matters. The parts are the digits of the bias in base 256, taken with round() on a grid: rounding by
    `.to(bfloat16)` instead is dropped by torch.compile and leaves errors up to 1e3. The gradient goes through the first part.
    """
    e = 2.0 ** round(math.log2(math.sqrt(d)))
    z = (key_bias.double() - key_bias[..., -1:].detach().double()) * (math.sqrt(d) / e)
    rest, parts = z.detach(), []
    grid = torch.exp2(torch.ceil(torch.log2((rest.abs().amax() / 256).clamp_min(1e-30))))
    for _ in range(BIAS_CHANNELS):
        parts.append((rest / grid).round() * grid)
        rest, grid = rest - parts[-1], grid / 256
    parts[0] = z + (parts[0] - z.detach())
    return e, torch.stack(parts, dim=-1)


def attend(q, k, v, phase=None, rotate_values=False, key_bias=None):
    """Causal attention under accumulated rotations and a key bias, in place of F.scaled_dot_product_attention(q, k, v, is_causal=True).

    softmax_j(q_i . P_{j->i} k_j / sqrt(d) + key_bias_j) over v_j, or over P_{j->i} v_j with rotate_values.
    q, k, v (B, H, T, d); phase (B|1, H|1, T, d/2) radians or its `cos_sin` pair; key_bias (B|1, H, T), for ALiBi slope_h * j.
    -> (B, H, T, d). Any T, float64 to bfloat16, differentiable; memory O(T d) on fused kernels. Raises ValueError on bad shapes.
    """
    d = q.size(-1)
    if phase is not None:
        cos, sin = cos_sin(phase)
        q, k = rotate(q, (cos, sin)), rotate(k, (cos, sin))
        if rotate_values:
            v = rotate(v, (cos, sin))                                       # encode: v_j -> C_j^-1 v_j
    if key_bias is not None:
        if key_bias.shape[1:] != k.shape[1:3] or key_bias.size(0) not in (1, k.size(0)):
            raise ValueError(f"attend: key_bias must be (B|1, H, T) = {tuple(k.shape[:3])}, got {tuple(key_bias.shape)}")
        e, parts = bias_channels(key_bias, d)
        q = F.pad(q, (0, BIAS_CHANNELS), value=e)                           # (B, H, T, d + 8)
        k = torch.cat((k, parts.to(k.dtype).expand(k.size(0), -1, -1, -1)), dim=-1)
        v = F.pad(v, (0, BIAS_CHANNELS))                                    # fused kernels want equal head dims
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=d ** -0.5)[..., :d]
    if phase is not None and rotate_values:
        o = rotate(o, (cos, -sin))                                          # decode: C_i
    return o


# ---------------------------------------------------------------------------------------------------------------------
# Modules: whatever owns parameters or depends on tokens

class SharedTransport(nn.Module):
    """Phase and key bias that all layers share, from token ids: constant steps, angle tables, ALiBi.

    Random angles are a buffer that stays float32 under model.to(bfloat16), since its bits are kept as integers.
    """

    def __init__(self, pos, vocab_size, n_head, head_dim, sigma=0.3, rope_base=10000.0):
        super().__init__()
        rotation, self.bias = parse(pos)
        if head_dim % 2 and SCHEMES[rotation].step != "none":
            raise ValueError(f"{pos} turns channel pairs: the head dim must be even, got {head_dim}")
        self.step, self.n_head, self.head_dim, self.rope_base = SCHEMES[rotation].step, n_head, head_dim, rope_base
        if self.step in ("random", "table"):                                # N(0, sigma^2) per token id, head and block
            table = sigma * torch.randn(vocab_size, n_head * head_dim // 2, generator=torch.Generator().manual_seed(ANGLE_SEED))
            if self.step == "table":
                self.table = nn.Parameter(table)
            else:
                self.register_buffer("table_bits", table.view(torch.int32))

    def forward(self, idx, dtype=torch.float32):
        """idx (B, T) token ids -> (cos_sin pair of (B|1, H|1, T, d/2) in dtype, or None), (key_bias (1, H, T) float64, or None)."""
        (B, T), turn, key_bias = idx.shape, None, None
        if self.step == "constant":
            turn = cos_sin(accumulate(rope_steps(T, self.head_dim, self.rope_base, idx.device), dtype)[None, None])
        elif self.step in ("random", "table"):
            table = self.table if self.step == "table" else self.table_bits.view(torch.float32)
            steps = F.embedding(idx, table)                                 # (B, T, H * d/2)
            turn = cos_sin(accumulate(steps, dtype).view(B, T, self.n_head, -1).transpose(1, 2))
        if self.bias == "alibi":
            key_bias = (alibi_slopes(self.n_head, idx.device)[:, None] * torch.arange(T, device=idx.device))[None]
        return turn, key_bias


class LayerTransport(nn.Module):
    """One layer's attention under `pos`; owns the projections of schemes whose steps come from the layer's input."""

    def __init__(self, pos, n_embd, n_head, sigma=0.3):
        super().__init__()
        self.scheme, self.n_head = SCHEMES[parse(pos)[0]], n_head
        if self.scheme.step == "hidden":
            self.steps = nn.Linear(n_embd, n_embd // 2, bias=False)         # (C) -> (H * d/2) angles
            self.init_std = {"steps": sigma / math.sqrt(n_embd)}            # inputs have unit RMS: angles start as N(0, sigma^2)

    def forward(self, q, k, v, x, shared):
        """q, k, v (B, H, T, d), x (B, T, C) the layer's normalised input, shared from SharedTransport -> (B, H, T, d)."""
        turn, key_bias = shared
        if self.scheme.step == "hidden":
            with torch.autocast(x.device.type, enabled=False):              # step angles are never bfloat16
                dtype = torch.promote_types(self.steps.weight.dtype, torch.float32)
                steps = F.linear(x.to(dtype), self.steps.weight.to(dtype))
                phase = accumulate(steps, dtype)                            # (B, T, H * d/2)
            turn = cos_sin(phase.view(*phase.shape[:2], self.n_head, -1).transpose(1, 2))
        return attend(q, k, v, turn, self.scheme.values, key_bias)
