"""Positions as transport: every scheme of "Why Do Accumulated Transformations Extrapolate?" (arXiv 2606.24975).

    o_i = sum_j softmax_j( q_i . P_{j->i} k_j / sqrt(d) + b_j - b_i )  P_{j->i} v_j,      P_{j->i} = M_i M_{i-1} ... M_{j+1}

Every token t contributes an orthogonal step M_t. A key, and where the scheme says so a value, is carried along the path of
tokens from its place j to the query's place i. Products telescope, P_{j->i} = C_i C_j^-1 with C_t = M_t C_{t-1}, so

    encode q, k (and v) by C_t^-1   ->   one causal softmax attention   ->   decode the output by C_i.

A distance bias b is added to the logits. It may be any function of the key's place minus the same function of the query's,
b_j - b_i; biases that are not such a difference, like T5's, do not fit here. This file needs torch alone: copy it, or any
function of it. First reading: `accumulate`, `Rotation`, `attend`, then the modules and SCHEMES at the end.

Conventions (tested in test_all.py)
  path    from key j to query i is (j, i]: the key's own step is left out, the query's is in; P_{i->i} = I.
          New steps multiply on the left.
  pairs   are half-split: channel c turns together with channel c + d/2 (Llama and GPT-NeoX checkpoints).
  sign    is RoPE's: q, k and v are rotated by +phase, the output by -phase. RoPE is the case of a constant step,
          ALiBi that of a constant forget gate, no positions (NoPE) that of a zero step.
  shapes  q (B, H, T, d); k, v the same, or more positions (queries are then the last ones), or fewer heads (each serves
          H / H_kv heads of q in a row); phases (B|1, H_kv|1, T, d/2) in radians; key biases (B|1, H|1, T).
  norms   on q and k, if any, come before transport: a learnable gain after it would break the path law.
"""
import math
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

SEGMENT = 768       # queries that biased attention and PaTH take at a time; CPU kernels take larger tiles from 768 on
CHUNK = 64          # steps in a chunk of the UT transform
NEVER = -2.0 ** 15  # a logit this far below the best of its row has no weight
TINY = 1e-30        # PaTH's keys fade; what is smaller than this would make some CPUs ten times slower


# ---------------------------------------------------------------------------------------------------------------------
# First reading: rotations that accumulate, biases, and attention

def accumulate(steps, start=None, dtype=torch.float32):
    """Phase of every position: the running sum of step angles, wrapped to (-pi, pi].

    steps (..., T, d/2) radians, any float dtype; start (..., 1, d/2): the phase before the first step, if it is not zero.
    -> (..., T, d/2) in `dtype`. Sum and wrap are in float64: a float32 sum is off by up to 1e-2 rad at T = 65,536, and
    steps in bfloat16 are useless whatever the sum.
    """
    phase = steps.cumsum(-2, dtype=torch.float64)
    if start is not None:
        phase = phase + start
    turns = torch.ceil(phase.detach() * (0.5 / math.pi) - 0.5)
    return phase.sub(turns, alpha=2 * math.pi).to(dtype)


class Rotation:
    """A transport that turns channel pairs (c, c + d/2) by a phase: RoPE with phase = accumulate(rope_steps(T, d)).

    phase (B|1, H|1, T, d/2) radians. Like every transport it has `encode`, for q, k and v, and its inverse `decode`.
    """

    def __init__(self, phase):
        self.phase, self.cos, self.sin = phase, phase.cos(), phase.sin()

    def encode(self, x):
        """x_t -> C_t^-1 x_t, (B, H, T, d) in x's dtype. Raises ValueError on shapes that do not fit."""
        return turn(x, self.cos, self.sin)

    def decode(self, o):
        """o_t -> C_t o_t."""
        return turn(o, self.cos, -self.sin)


def turn(x, cos, sin):
    """Turn pairs of x (B, H, T, d) by angles whose cosines and sines are (B|1, H|1, T, d/2), in the wider dtype of the two."""
    B, H, T, d = x.shape
    if cos.dim() != 4 or cos.size(0) not in (1, B) or cos.size(1) not in (1, H) or cos.shape[2:] != (T, d // 2) or d % 2:
        raise ValueError(f"a phase for x {tuple(x.shape)} must be ({B}|1, {H}|1, {T}, {d}/2), got {tuple(cos.shape)}")

    x1, x2 = x.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * cos), dim=-1).to(x.dtype)


def rotate(x, phase):
    """Turn channel pairs of x (B, H, T, d) by phase (B|1, H|1, T, d/2): q and k of RoPE, with accumulate(rope_steps(T, d))."""
    return Rotation(phase).encode(x)


def rope_steps(T, d, base=10000.0, device=None):
    """RoPE as steps: the angles base^(-2c/d) at every position (Su et al., arXiv 2104.09864). -> (T, d/2) float64."""
    if d % 2:
        raise ValueError(f"rope_steps: the head dim must be even, got {d}")
    angles = base ** (-torch.arange(0, d, 2, dtype=torch.float64, device=device) / d)
    return angles.expand(T, d // 2)


def alibi_slopes(n_head, device=None):
    """ALiBi's published slopes (Press et al., arXiv 2108.12409), (n_head,) float64: 2^(-8h/n) for a power of two n;
    otherwise those of the power of two below, then every second one of the power of two above. Key bias: slope * place."""
    n = 2 ** int(math.log2(n_head))
    slopes = [2 ** (-8 * h / n) for h in range(1, n + 1)]
    slopes += [2 ** (-4 * h / n) for h in range(1, 2 * (n_head - n), 2)]
    return torch.tensor(slopes, dtype=torch.float64, device=device)


def forget_bias(log_forget):
    """Forget gates (Lin et al., arXiv 2503.02130) as a key bias: log f <= 0, (B, H, T) -> -cumsum(log f), float64."""
    return -log_forget.cumsum(-1, dtype=torch.float64)


def attend(q, k, v, transport=None, value_transport=None, key_bias=None, past=None):
    """Causal attention with carried keys and values, in place of F.scaled_dot_product_attention(q, k, v, is_causal=True).

    q (B, H, T, d), k and v (B, H_kv, T_k, d): with T < T_k the queries are the last T positions, and every head of k and v
    serves H / H_kv heads of q. transport carries the keys, value_transport the values (the same object, another one, or none
    if values stay); both are for the T_k positions of k. key_bias (B|1, H|1, T_k) is added to the logits after the
    1/sqrt(d) scale: slope * place for ALiBi, `forget_bias` for forget gates, -inf or -1e9 to hide a padded key.
    past: a dict, empty at first, that keeps encoded keys and values from call to call; k, v and transports are then those of
    the new positions, key_bias that of all.
    -> (B, H, T, d) in q's dtype; differentiable, float64 to bfloat16, memory linear in T_k. Raises ValueError on bad shapes
    before `past` is touched.
    """
    check_shapes(q, k, v, key_bias, past)
    if hasattr(transport, "attend"):                        # PaTH has no single encode: see the second reading
        return transport.attend(q, k, v, value_transport, key_bias, past)

    if transport is not None:
        q, k_encoded = for_queries(transport.encode, q, k), transport.encode(k)
    else:
        k_encoded = k
    v_encoded = v if value_transport is None else value_transport.encode(v)

    keys, values = k_encoded, v_encoded
    if past is not None:
        keys, values = append(past, "k", keys, 2), append(past, "v", values, 2)

    if key_bias is None:
        o = softmax_attention(q, keys, values)
    else:
        o = biased_attention(q, keys, values, key_bias)

    return o if value_transport is None else for_queries(value_transport.decode, o, k)


def check_shapes(q, k, v, key_bias, past):
    """Raise ValueError unless the arguments of `attend` fit together."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        raise ValueError(f"attend needs q (B, H, T, d) and k, v of one shape (B, H_kv, T_k, d), got {shapes}")
    if q.size(0) != k.size(0) or q.size(3) != k.size(3) or q.size(1) % k.size(1):
        raise ValueError(f"attend needs the same batch and head dim, and H a multiple of H_kv, got {shapes}")
    if not 1 <= q.size(2) <= k.size(2):
        raise ValueError(f"attend needs at least one query, and no more queries than keys, got {shapes}")

    old = past["k"].size(2) if past and "k" in past else 0
    if old and (past["k"].shape[:2], past["k"].size(3)) != (k.shape[:2], k.size(3)):
        raise ValueError(f"the keys of earlier calls are {tuple(past['k'].shape)}, they do not go on with {shapes}")
    if key_bias is not None:
        fits = key_bias.dim() == 3 and key_bias.size(0) in (1, q.size(0)) and key_bias.size(1) in (1, q.size(1))
        if not fits or key_bias.size(2) != old + k.size(2):
            wanted = f"({q.size(0)}|1, {q.size(1)}|1, {old + k.size(2)})"
            raise ValueError(f"key_bias must be {wanted} for {shapes}, got {tuple(key_bias.shape)}")


def for_queries(f, x, k):
    """f is the encode or decode of k's heads and positions: apply it to x, of the last positions or of more heads."""
    missing, groups = k.size(2) - x.size(2), x.size(1) // k.size(1)
    if missing == 0 and groups == 1:
        return f(x)
    x = F.pad(x, (0, 0, missing, 0)).unflatten(1, (k.size(1), groups))
    x = torch.stack([f(head) for head in x.unbind(2)], dim=2)
    return x.flatten(1, 2)[:, :, missing:]


def append(past, name, new, dim):
    """Join what past[name] holds and `new` along dim; keep the whole there, and return it."""
    past[name] = torch.cat((past[name], new), dim) if name in past else new
    return past[name]


def softmax_attention(q, k, v, mask=None, causal=True, scale=None):
    """The one call of F.scaled_dot_product_attention. With fewer queries than keys, they are the last ones.

    mask (..., T, T_k) is added to the logits; causality is then its business.
    """
    T, T_k = q.size(2), k.size(2)
    is_causal, grouped = False, k.size(1) != q.size(1)
    if causal and mask is None:
        if T == T_k:
            is_causal = True
        elif T > 1:                                         # is_causal would align the first query with the first key
            mask = torch.ones(T, T_k, dtype=torch.bool, device=q.device).tril(T_k - T)
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=grouped)


# ---------------------------------------------------------------------------------------------------------------------
# Biases, precise in every row. Softmax is blind to a constant per row, so a key bias is enough, and each row may have its own
# zero. Here that is the largest bias the row sees: what has weight is then close to zero, however far the bias has run,
# and no later token reaches an earlier row.

def biased_attention(q, k, v, key_bias):
    """softmax_j(q_i . k_j / sqrt(d) + key_bias_j) v_j over j <= i; shapes as in `attend`, memory linear in T_k.

    Logits that matter are right to 1e-5 in every row in float32.
    """
    dtype, kernel, groups = q.dtype, kernel_dtype(q, key_bias), q.size(1) // k.size(1)
    q, k, v = q.to(kernel), k.to(kernel), v.to(kernel)
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)

    bias = key_bias.double().clamp_min(-1e30)               # -inf - -inf would be no number
    short = q.size(2) * k.size(2) <= SEGMENT ** 2
    o = masked_attention(q, k, v, bias) if short else segmented_attention(q, k, v, bias)
    return o.to(dtype)


def kernel_dtype(q, key_bias):
    """The dtype in which logits with a bias are made: float32 on CPU, where some bfloat16 kernels round logits, and for a bias
    that is learned, since bfloat16 gradients cost a gate 5 to 13 %; else q's."""
    learned = key_bias is not None and key_bias.requires_grad
    return torch.promote_types(q.dtype, torch.float32) if learned or q.device.type == "cpu" else q.dtype


def bias_mask(bias, best, rows, keys, dtype):
    """bias_j - best_i for queries in rows and keys in keys (slices of positions), (B|1, H|1, rows, keys); -inf ahead of i."""
    mask = (bias[..., None, keys] - best[..., rows, None]).to(dtype)
    ahead = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1 + rows.start - keys.start)
    return mask.masked_fill(ahead, -math.inf)


def running_best(bias):
    """The largest bias that each row sees, (..., T) -> (..., T): its zero. Softmax does not depend on it."""
    return bias.detach().cummax(-1).values


def masked_attention(q, k, v, bias):
    """Short texts: the bias of every pair as a mask. Its gradient goes through an extra channel, which keeps kernels fused."""
    d, T = q.size(-1), k.size(2)
    mask = bias_mask(bias.detach(), running_best(bias), slice(T - q.size(2), T), slice(0, T), q.dtype)
    if bias.requires_grad:
        nothing = (bias - bias.detach()) * math.sqrt(d)     # adds zero to a logit, but takes its gradient
        channels = F.pad(nothing[..., None], (0, 7)).to(k.dtype).expand(*k.shape[:3], 8)
        q, k, v = F.pad(q, (0, 8), value=1.0), torch.cat((k, channels), dim=-1), F.pad(v, (0, 8))
    with torch.autocast(q.device.type, enabled=False):
        return softmax_attention(q, k, v, mask, scale=d ** -0.5)[..., :d]


@torch.compiler.disable                                     # it would unroll the loop, anew for every length
def segmented_attention(q, k, v, bias):
    """Long texts: segments of queries, with explicit logits for the keys of the segment and one SDPA for those before it."""
    wide = torch.promote_types(q.dtype, torch.float32)
    d, T = q.size(-1), k.size(2)
    first, best, out = T - q.size(2), running_best(bias), []

    with torch.autocast(q.device.type, enabled=False):
        for start in range(first, T, SEGMENT):
            near = slice(start, min(start + SEGMENT, T))
            rows = q[:, :, near.start - first:near.stop - first]
            logits = rows.to(wide) @ (k[:, :, near].to(wide).mT * d ** -0.5) + bias_mask(bias, best, near, near, wide)
            out.append(near_and_far(logits, v[:, :, near], rows, k[:, :, :start], v[:, :, :start], bias, best))

    return torch.cat(out, dim=2)


def near_and_far(logits, near_v, q, far_k, far_v, bias, best):
    """One softmax over the keys of a segment, with known logits (B, H, S, S), and all keys before it. -> (B, H, S, d)

    q, near_v (B, H, S, d); far_k, far_v (B, H, start, d); bias and best (B|1, H|1, T) of all positions.
    SDPA does not tell its normaliser, so the near keys take part in its call as one more key: its logit is their log-sum-exp,
    its value marks an extra channel, and what arrives in that channel is the weight of the near part. That key comes last:
    a kernel that meets the largest logit first computes weights of 1e-40 for far keys, which is slow on some CPUs.
    """
    (B, H, S, d), start, wide = q.shape, far_k.size(2), logits.dtype
    weights = logits.softmax(-1)
    near = weights @ near_v.to(wide)
    if start == 0:
        return near.to(q.dtype)

    zero = best[..., start - 1, None]                       # that of all far logits
    lse = logits.amax(-1) - weights.amax(-1).log()          # cheaper than logsumexp, and as exact
    near_logit = (lse + (best[..., start:start + S] - zero)).clamp(NEVER, -NEVER)
    far_bias = (bias[..., :start] - zero).clamp_min(NEVER)
    n = 8 if wide == torch.float64 else 4                   # four digits are right to 2^-32, and keep head dims even in 8s
    e, near_digits = digits(near_logit, d, n)
    e, far_digits = digits(far_bias, d, n)

    # channels: the head dim, n for the logit of the near keys, n for the bias of the far ones
    queries = torch.cat((q, near_digits.to(q.dtype), q.new_full((B, H, S, n), e)), dim=-1)
    keys = q.new_zeros(B, H, start + 1, d + 2 * n)
    values = torch.zeros_like(keys)
    keys[:, :, :start, :d] = far_k
    keys[:, :, :start, d + n:] = far_digits
    keys[:, :, start, d:d + n] = e
    values[:, :, :start, :d] = far_v
    values[:, :, start, d] = 1

    y = softmax_attention(queries, keys, values, causal=False, scale=d ** -0.5).to(wide)
    return (y[..., :d] + y[..., d:d + 1] * near).to(q.dtype)


def digits(logit, d, n):
    """Write a logit as n channels: -> e, parts (..., n) with e * sum(parts) / sqrt(d) = logit, for q . k / sqrt(d).

    logit (...) float64. The parts are digits in base 256 that bfloat16 holds exactly, so no cast can hurt. They are taken
    with round() on a grid of its own for every element: `.to(bfloat16)` would be dropped by torch.compile and leave errors up
    to 1e3. The gradient goes through the first part.
    """
    e = 2.0 ** round(math.log2(math.sqrt(d)))
    z = logit * (math.sqrt(d) / e)
    rest, parts = z.detach(), []
    grid = torch.exp2(torch.ceil(torch.log2(rest.abs().clamp_min(1e-30) / 256)))
    for _ in range(n):
        parts.append((rest / grid).round() * grid)
        rest, grid = rest - parts[-1], grid / 256
    parts[0] = z + (parts[0] - z.detach())
    return e, torch.stack(parts, dim=-1)


# ---------------------------------------------------------------------------------------------------------------------
# Second reading: steps that do not commute, H_t = I - beta_t w_t w_t^T. Products of many are taken chunk by chunk.

def ut_transform(w, beta):
    """Products of H_t = I - beta_t w_t w_t^T within chunks: H_i ... H_1 = I - W[:i]^T X[:i, :i] W[:i] for every i of a chunk.

    w (B, H, T, d), beta (B, H, T) -> W (B, H, N, c, d), X (B, H, N, c, c) lower triangular; the last chunk is filled up with
    identity steps (w = 0). (Compact WY form: Bischof & Van Loan 1987; Yang et al., arXiv 2406.06484.) Needs float32 or
    float64: bfloat16 breaks the solve.
    """
    W, b = chunks(w), chunks(beta)
    L = (b[..., None] * W @ W.mT).tril(-1)
    return W, torch.linalg.solve_triangular(L, b.diag_embed(), upper=False, unitriangular=True)


def chunks(x):
    """(B, H, T, ...) -> (B, H, N, c, ...), c = CHUNK or less, zeros at the end."""
    T = x.size(2)
    size = min(CHUNK, T)
    x = F.pad(x, (0, 0) * (x.dim() - 3) + (0, -T % size))
    return x.unflatten(2, (-1, size))


class Reflections:
    """The transport of accumulated exact reflections H_t = I - 2 w_t w_t^T / |w_t|^2.

    w (B, H, T, d), any scale; a zero w is the identity step. start (B, H, d, d): the product of earlier steps.
    Products over chunks are in float64: after 65,536 steps C is then orthogonal to 1e-13, against 1e-4 in float32; what a chunk
    adds is applied in float32 (float64 for float64 w). beta = 2 / |w|^2 belongs to the graph: with beta = 2 and w normalised
    outside it gradients are wrong, since C^T = C^-1 holds on the sphere only.
    """

    def __init__(self, w, start=None):
        dtype, (B, H, T, d) = torch.promote_types(w.dtype, torch.float32), w.shape
        w = w.double()
        norm = w.square().sum(-1)
        beta = torch.where(norm > 0, 2 / torch.where(norm > 0, norm, 1), 0)
        W, X = ut_transform(w, beta)
        XW = X @ W                                          # (B, H, N, c, d)

        C = torch.eye(d, dtype=w.dtype, device=w.device).expand(B, H, d, d) if start is None else start
        products = []                                       # C at the start of every chunk
        for n in range(W.size(2)):
            products.append(C)
            C = C - W[:, :, n].mT @ (XW[:, :, n] @ C)

        self.W, self.XW, self.end = W.to(dtype), XW.to(dtype), C
        self.C = torch.stack(products, dim=2).to(dtype)     # (B, H, N, d, d)

    def encode(self, x):
        """x_t -> C_t^-1 x_t = C_t^T x_t, (B, H, T, d) in x's dtype: to the chunk's start, then to the beginning."""
        y = self.chunks_of(x)
        y = (y - (y @ self.W.mT).tril() @ self.XW) @ self.C
        return y.flatten(2, 3)[:, :, :x.size(2)].to(x.dtype)

    def decode(self, o):
        """o_t -> C_t o_t."""
        y = self.chunks_of(o) @ self.C.mT
        y = y - (y @ self.XW.mT).tril() @ self.W
        return y.flatten(2, 3)[:, :, :o.size(2)].to(o.dtype)

    def chunks_of(self, x):
        y = chunks(x.to(self.W.dtype))
        if y.shape[2:] != self.W.shape[2:] or y.size(0) != self.W.size(0) or y.size(1) != self.W.size(1):
            raise ValueError(f"reflections {tuple(self.W.flatten(2, 3).shape)} do not fit {tuple(x.shape)}")
        return y


class Path(NamedTuple):
    """PaTH's steps I - beta w w^T (Yang et al., arXiv 2505.16381), in the place of a transport: w (B, H, T, d) unit vectors,
    beta (B, H, T) in (0, 2). They are not orthogonal: C_t grows singular (1e-15 after 256 random steps), so no encode."""
    w: torch.Tensor
    beta: torch.Tensor

    def attend(self, q, k, v, value_transport, key_bias, past):
        if value_transport is not None or q.shape != k.shape:
            raise ValueError(f"PaTH carries no values and takes q, k of one shape, got {tuple(q.shape)}, {tuple(k.shape)}")
        return path_attention(q, k, v, self.w, self.beta, key_bias, past)


def path_attention(q, k, v, w, beta, key_bias=None, past=None):
    """PaTH attention: logits q_i . H_i ... H_{j+1} k_j / sqrt(d) + key_bias_j, H_t = I - beta_t w_t w_t^T.

    q, k, v (B, H, T, d), w (B, H, T, d) unit vectors, beta (B, H, T) in (0, 2) -> (B, H, T, d); values are not carried.
    key_bias and past as in `attend`; fla's kernel adds a gate before the 1/sqrt(d) scale, this and FoX after it.
    Segment by segment: keys of the segment have explicit logits; all earlier ones have been carried to its start, where one
    SDPA meets the queries, carried back. Transport is in float32 (float64 for float64 input), autocast or not.
    """
    if w.shape != q.shape or beta.shape != q.shape[:3] or not q.size(2):
        raise ValueError(f"path_attention: w {tuple(w.shape)} and beta {tuple(beta.shape)} do not fit q {tuple(q.shape)}")
    check_shapes(q, k, v, key_bias, past)
    dtype, kernel, wide = q.dtype, kernel_dtype(q, key_bias), torch.promote_types(q.dtype, torch.float32)
    (B, H, T, d), old, out = q.shape, past["k"].size(2) if past and "k" in past else 0, []

    with torch.autocast(q.device.type, enabled=False):
        q, k, v, w, beta = q.to(wide), k.to(wide), v.to(wide), w.to(wide), beta.to(wide)
        bias = q.new_zeros(1, 1, old + T).double() if key_bias is None else key_bias.double().clamp_min(-1e30)
        best = running_best(bias)
        keys = past["k"] if old else k[:, :, :0]            # those before the segment, carried to its start
        v = append(past, "v", v, 2) if past is not None else v

        for start in range(0, T, SEGMENT):
            now = slice(start, min(start + SEGMENT, T))
            near = slice(old + now.start, old + now.stop)
            logits, q_start, k_end, product = path_segment(q[:, :, now], k[:, :, now], w[:, :, now], beta[:, :, now])
            logits = logits * d ** -0.5 + bias_mask(bias, best, near, near, wide)
            far_v = v[:, :, :near.start]
            out.append(near_and_far(logits, v[:, :, near], q_start.to(kernel), keys, far_v, bias, best))
            keys = torch.cat((F.hardshrink(keys @ product, TINY), k_end), dim=2)

        if past is not None:
            past["k"] = keys
        return torch.cat(out, dim=2).to(dtype)


def path_segment(q, k, w, beta):
    """Steps within a segment of S tokens, chunk by chunk. q, k, w (B, H, S, d), beta (B, H, S) ->

    logits  (B, H, S, S)   q_i . H_i ... H_{j+1} k_j for j <= i, zero ahead
    q_start (B, H, S, d)   queries carried back to the segment's start: their product with a key there is its logit
    k_end   (B, H, S, d)   keys carried on to the segment's end
    product (B, H, d, d)   takes keys, as rows, from the segment's start to its end
    """
    S = q.size(2)
    W, X = ut_transform(w, beta)
    q, k = chunks(q), chunks(k)                             # (B, H, N, c, d)
    size = q.size(3)

    # inside a chunk: logits, queries at its start, keys at its end, and its product A = H_1 ... H_c for keys as rows
    QWX, WK = (q @ W.mT).tril() @ X, (W @ k.mT).tril(-1)
    own = (q @ k.mT - QWX @ WK).tril()
    q = q - QWX @ W
    k = k - (X @ WK).mT @ W
    A = torch.eye(q.size(-1), dtype=q.dtype, device=q.device) - W.mT @ X.mT @ W

    # from chunk to chunk: keys so far are carried on, queries back
    keys, product, rows, q_start = k[:, :, 0, :0], None, [], []
    for n in range(W.size(2)):
        row = torch.cat((q[:, :, n] @ keys.mT, own[:, :, n]), dim=-1)
        rows.append(F.pad(row, (0, (W.size(2) - n - 1) * size)))
        q_start.append(q[:, :, n] if product is None else q[:, :, n] @ product.mT)
        keys = torch.cat((keys @ A[:, :, n], k[:, :, n]), dim=2)
        product = A[:, :, n] if product is None else product @ A[:, :, n]

    logits, q_start = torch.cat(rows, dim=2), torch.cat(q_start, dim=2)
    return logits[:, :, :S, :S], q_start[:, :, :S], keys[:, :, :S], product


# ---------------------------------------------------------------------------------------------------------------------
# The schemes. A step source turns token ids and a layer's input into a transport, a bias module turns them into a key bias.
# A new scheme is one class of either kind and one row of SCHEMES.
#
# forward(idx, x, past): idx (B, T) token ids; x (B, T, C) the layer's normalised input, or the token embeddings for a `shared`
# module, which all layers share; float32 or wider. past: a dict that keeps what the next call goes on from.
# Constructors take a config with n_head, n_embd, vocab_size, sigma, rope_base.

class Angles(nn.Module):
    """Steps that turn channel pairs. A subclass gives `steps(idx, x, past)`: angles (B|1, T, H|1, d/2), radians."""
    shared = True

    def __init__(self, config):
        super().__init__()
        self.n_head, self.head_dim = config.n_head, config.n_embd // config.n_head
        if self.head_dim % 2:
            raise ValueError(f"channels turn in pairs: the head dim must be even, got {self.head_dim}")

    def forward(self, idx, x, past):
        steps = self.steps(idx, x, past).transpose(1, 2)
        phase = accumulate(steps, past.get("phase"), torch.float64)
        past["phase"] = phase[:, :, -1:].clone()
        return Rotation(phase.to(x.dtype))


class ConstantAngles(Angles):
    def __init__(self, config):
        super().__init__(config)
        self.base = config.rope_base

    def steps(self, idx, x, past):
        return rope_steps(idx.size(1), self.head_dim, self.base, idx.device)[None, :, None]


def random_angles(config):
    """N(0, sigma^2) angles per token id, head and pair, (vocab_size, H * d/2). They come from a generator of their own, which
    torch.manual_seed determines: every rank, and every scheme with a table, draws the same."""
    generator = torch.Generator().manual_seed(torch.initial_seed())
    return config.sigma * torch.randn(config.vocab_size, config.n_embd // 2, generator=generator)


class RandomAngles(Angles):
    def __init__(self, config):
        super().__init__(config)
        bits = random_angles(config).view(torch.int32)      # model.to(bfloat16) rounds buffers of floats, not of integers
        self.register_buffer("bits", bits)

    def steps(self, idx, x, past):
        return F.embedding(idx, self.bits.view(torch.float32)).unflatten(-1, (self.n_head, -1))


class LearnedAngles(Angles):
    def __init__(self, config):
        super().__init__(config)
        self.table = nn.Parameter(random_angles(config))

    def steps(self, idx, x, past):
        return F.embedding(idx, self.table).unflatten(-1, (self.n_head, -1))


class HiddenAngles(Angles):
    shared = False

    def __init__(self, config):
        super().__init__(config)
        self.sigma, self.angle = config.sigma, nn.Linear(config.n_embd, config.n_embd // 2, bias=False)

    def init_weights(self):
        nn.init.normal_(self.angle.weight, std=1 / math.sqrt(self.angle.in_features))   # of unit RMS, as inputs are

    def steps(self, idx, x, past):
        return (self.sigma * linear(self.angle, x)).unflatten(-1, (self.n_head, -1))


class HiddenVectors(nn.Module):
    """The vectors w of reflections as PaTH makes them from a layer's input: low rank, short causal convolution, SiLU."""
    RANK, TAPS = 32, 3

    def __init__(self, config):
        super().__init__()
        C, self.n_head = config.n_embd, config.n_head
        self.down = nn.Linear(C, self.RANK, bias=False)
        self.up = nn.Linear(self.RANK, C, bias=False)
        self.conv = nn.Conv1d(C, C, self.TAPS, groups=C, bias=False)

    def forward(self, x, past):
        """(B, T, C) -> (B, H, T, d), not normalised."""
        u = linear(self.up, linear(self.down, x)).mT        # (B, C, T)
        tail = past.get("tail", u.new_zeros(u.size(0), u.size(1), self.TAPS - 1))
        u = torch.cat((tail, u), dim=-1)
        past["tail"] = u[..., 1 - self.TAPS:]

        u = F.silu(F.conv1d(u, self.conv.weight.to(x.dtype), groups=u.size(1)))
        return u.unflatten(1, (self.n_head, -1)).mT


class HiddenReflections(nn.Module):
    shared = False

    def __init__(self, config):
        super().__init__()
        self.w = HiddenVectors(config)

    def forward(self, idx, x, past):
        reflections = Reflections(self.w(x, past), past.get("product"))
        past["product"] = reflections.end
        return reflections


class PathSteps(nn.Module):
    shared = False

    def __init__(self, config):
        super().__init__()
        self.w, self.beta = HiddenVectors(config), nn.Linear(config.n_embd, config.n_head)

    def forward(self, idx, x, past):
        w = self.w(x, past)
        w = w * torch.rsqrt(w.square().sum(-1, keepdim=True) + 1e-6)
        return Path(w, 2 * torch.sigmoid(linear(self.beta, x)).mT)


class Alibi(nn.Module):
    shared = True

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head

    def forward(self, idx, x, past):
        return alibi_slopes(self.n_head, idx.device)[None, :, None] * places(idx, past)


class ForgetGate(nn.Module):
    shared = False

    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(config.n_embd, config.n_head)

    def forward(self, idx, x, past):
        log_forget = F.logsigmoid(linear(self.gate, x)).mT  # (B, H, T)
        return forget_bias(append(past, "log_forget", log_forget, -1))


def places(idx, past):
    """The places 0, 1, 2, ... of all tokens so far, those of earlier calls included."""
    past["length"] = past.get("length", 0) + idx.size(1)
    return torch.arange(past["length"], device=idx.device)


def linear(layer, x):
    """A Linear layer in x's dtype, whatever the dtype of its parameters."""
    return F.linear(x, layer.weight.to(x.dtype), None if layer.bias is None else layer.bias.to(x.dtype))


class Scheme(NamedTuple):
    kind: str       # "rotation" or "bias"
    module: type    # step source or bias; None: the identity step
    values: bool    # are values carried too?
    about: str


SCHEMES = {
    "nope":            Scheme("rotation", None, False, "identity step: no positions (control)"),
    "rope":            Scheme("rotation", ConstantAngles, False, "constant angle per pair (the baseline)"),
    "rope_qkv":        Scheme("rotation", ConstantAngles, True, "constant angle per pair, values too (control)"),
    "random_qk":       Scheme("rotation", RandomAngles, False, "frozen random angle per token id and pair"),
    "random_qkv":      Scheme("rotation", RandomAngles, True, "frozen random angle per token id and pair, values too"),
    "accum_qk":        Scheme("rotation", LearnedAngles, False, "learned angle per token id and pair"),
    "accum_qkv":       Scheme("rotation", LearnedAngles, True, "learned angle per token id and pair, values too"),
    "hidden_qk":       Scheme("rotation", HiddenAngles, False, "learned angle from the layer's input"),
    "hidden_qkv":      Scheme("rotation", HiddenAngles, True, "learned angle from the layer's input, values too"),
    "householder_qk":  Scheme("rotation", HiddenReflections, False, "exact reflection, its vector from the layer's input"),
    "householder_qkv": Scheme("rotation", HiddenReflections, True, "exact reflection from the layer's input, values too"),
    "path":            Scheme("rotation", PathSteps, False, "PaTH: I - beta ww', w and beta from the layer's input"),
    "alibi":           Scheme("bias", Alibi, False, "key bias slope_h * j (explicit far-mass control)"),
    "fox":             Scheme("bias", ForgetGate, False, "Forgetting Transformer: key bias -cumsum(log f)"),
}


def parse(pos):
    """Split a scheme name `ROTATION`, `BIAS` or `ROTATION+BIAS` into (rotation, bias); bias is None where there is none.

    Raises ValueError with the list of schemes for any other name.
    """
    rotations = [name for name, scheme in SCHEMES.items() if scheme.kind == "rotation"]
    biases = [name for name, scheme in SCHEMES.items() if scheme.kind == "bias"]
    if pos in rotations:
        return pos, None
    if pos in biases:
        return "nope", pos
    rotation, _, bias = pos.partition("+")
    if rotation in rotations and bias in biases:
        return rotation, bias
    raise ValueError(f"unknown scheme '{pos}'; rotations: {', '.join(rotations)}; biases: {', '.join(biases)}; "
                     "'+' joins a rotation and a bias, as in accum_qkv+alibi")


class Transport(nn.Module):
    """What a scheme gives to attention. With shared=True the part that all layers share, else the part that a layer owns."""

    def __init__(self, config, shared):
        super().__init__()
        rotation, bias = parse(config.pos)
        self.values = SCHEMES[rotation].values
        self.rotation, self.bias = self.own(rotation, config, shared), self.own(bias, config, shared)

    def own(self, name, config, shared):
        module = SCHEMES[name].module if name else None
        return module(config) if module is not None and module.shared == shared else None

    def forward(self, idx, x, past=None, shared=(None, None)):
        """idx (B, T), x (B, T, C), shared from the shared part -> (transport or None, key bias (B|1, H, T) or None)."""
        transport, key_bias = shared
        past = {} if past is None else past
        with torch.autocast(x.device.type, enabled=False):  # steps and gates are never bfloat16
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            if self.rotation is not None:
                transport = self.rotation(idx, x, past.setdefault("rotation", {}))
            if self.bias is not None:
                key_bias = self.bias(idx, x, past.setdefault("bias", {}))
        return transport, key_bias
