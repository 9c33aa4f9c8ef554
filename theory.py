"""The theory of "Why Do Accumulated Transformations Extrapolate?" (arXiv 2606.24975), checked and measured.

    python theory.py [--seed N]                        a table of all statements; exit status 1 if one fails
    python theory.py RUN... [--length N] [--plot]      the same things in trained models -> RUN/theory.json

Only a summary of the paper was at hand: the statements are reconstructions of what it claims, with proofs and
constants of our own. Each is a small function, and the check below it compares it with simulation, quadrature
or enumeration. Rows with "!" tell what a summary leaves out.

Every token makes an orthogonal step M_t, independent of the others and of q and k (if M_i comes from q_i's
token, only the n - 1 steps in between are). n = i - j steps lead from the key at j to the query at i; P =
M_i ... M_{j+1} is their product, s = q.Pk the score. The d channels of a head turn in d/2 pairs. A logit is
bounded by lam = |q||k|/sqrt(d), pair b adds lam_pairs = |q_b||k_b|/sqrt(d) to it. r = ||E M||, for a pair
|chi|, chi = E exp(i angle). alpha are attention weights; rho, the far mass, is the sum over far tokens.
"""
import argparse
import math
from bisect import bisect_left
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import data
from eval_extrapolate import (
    Progress, for_json, label_ends, load_run, parse_lengths, pyplot, save_figure,
    spread_evenly,
)
from train import pick_device
from transport import Rotation, Transport, path_segments, rope_steps, rotate

CHECKS = []                                                 # (section, check) in the order of this file
TEXTS = torch.cartesian_prod(*[torch.arange(6)] * 4)        # all of 4 tokens, 6 in the vocabulary
TABLE = {"section": "", "formula": ".5g", "": "", "simulated": ".5g", "+-": ".1g", "holds": "", "claim": ""}


# -----------------------------------------------------------------------------------------------------------
# The table. A check takes a random generator and yields rows: (claim, formula, relation, value[, within])

def check(section):
    def register(function):
        CHECKS.append((section, function))
        return function
    return register


def table(seed):
    """All rows, as dicts."""
    for section, rows in CHECKS:
        for row in rows(torch.Generator().manual_seed(seed % 2 ** 63)):
            yield {"section": section} | judge(*row)


def judge(claim, formula, relation, value, within=math.inf):
    """A row of the table: does formula <relation> value hold?

    Many values beside one formula are samples, of which mean and standard error are taken. Many formulas are
    cases, all of which must hold; the one with the least room is shown. "=" is to 1e-12, "~" to 5 standard
    errors; "<=" and ">=" have 4 to spare, "<" holds by more than 4. within: how many times too large (or, for
    "<=", too small) a bound may be.
    """
    formula, value = f64(formula), f64(value)
    mean, error = value, f64(0.0)
    if value.numel() > 1 == formula.numel():
        mean = value.mean()
        error = value.std() / math.sqrt(value.numel())

    over = mean - formula
    tiny = 1e-12 * (1 + formula.abs())
    room = {
        "=": tiny - over.abs(),
        "~": tiny - over.abs() + 5 * error,
        "<": over - tiny - 4 * error,
        "<=": over + tiny + 4 * error,
        ">=": tiny - over + 4 * error,
    }[relation]
    if within < math.inf:
        ratio = mean / formula if relation == "<=" else formula / mean
        room = torch.minimum(room, within - ratio)

    worst = room.argmin()
    return {
        "formula": float(formula.flatten()[worst]),
        "": relation,
        "simulated": float(mean.flatten()[worst]),
        "+-": float(error),
        "holds": bool(room.min() >= 0),
        "claim": claim,
    }


def f64(x):
    return torch.as_tensor(x, dtype=torch.float64)


def normal(g, *shape):
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def walk(g, paths, length, pairs):
    """Phases (paths, length, pairs) of N(0, 1/4) angles, so that r = exp(-1/8), at distances from 120 on."""
    angles = 0.5 * normal(g, paths, length, pairs)
    angles[:, 0] *= math.sqrt(120)
    return angles.cumsum(1)


def mirror(w):
    """Reflections I - 2 ww'/|w|^2: (..., d) -> (..., d, d)."""
    w = F.normalize(w, dim=-1)
    return eye(w.size(-1)) - 2 * w[..., :, None] * w[..., None, :]


def eye(d):
    return torch.eye(d, dtype=torch.float64)


def full(n, x):
    return torch.full((n,), x, dtype=torch.float64)


def quadrature(lam_pairs):
    """cos and e^(lam_b cos) at 64 angles, (64,) and (pairs, 64): their means are integrals over the angle."""
    x = (math.pi / 32 * torch.arange(64, dtype=torch.float64)).cos()
    return x, (lam_pairs[:, None] * x).exp()


def exp_i(angle):
    return torch.exp(1j * f64(angle))


# -----------------------------------------------------------------------------------------------------------
# 1. Transport

def cumulative(steps):
    """C_t = M_t ... M_1 of steps (T, d, d) -> (T, d, d).

    Products telescope, P_{j->i} = C_i C_j^-1, so that q_i.P_{j->i} k_j = (C_i'q_i).(C_j^-1 k_j) and
    sum_j alpha_j P_{j->i} v_j = C_i sum_j alpha_j C_j^-1 v_j. For orthogonal steps C_j^-1 = C_j'.
    """
    products = [steps[0]]
    for step in steps[1:]:
        products.append(step @ products[-1])
    return torch.stack(products)


@check(1)
def paths_factor(g):
    steps = mirror(normal(g, 12, 6))
    C = cumulative(steps)
    path = steps[9] @ steps[8] @ steps[7]
    yield "M_i M_{i-1} ... M_{j+1} = C_i C_j', reflections", C[9] @ C[6].mT, "=", path

    C = cumulative(0.25 * eye(6) + 0.75 * steps)
    error = (C[8] @ (C[3].inverse() - C[3].mT)).abs().max()
    yield "! not for I - beta ww', beta < 2: error of C_j'", 0.01, "<", error


# -----------------------------------------------------------------------------------------------------------
# 2. Spectral gap and mixing: E P = (E M)^n, so |E s| <= r^n |q||k|. Text is not iid: a run of one token never
# mixes, and tokens that stick together mix later than r^n says

def chi_table(angles, p):
    """chi of a table: angles (V, ...), token frequencies p (V,) -> complex (...)."""
    return torch.tensordot(p.to(torch.complex128), exp_i(angles), 1)


def mixing_time(r, eps, weight=1.0):
    """n_mix: the smallest n with sum_b weight_b r_b^n <= eps; for one pair ln(1/eps) / ln(1/r), rounded up.

    r and weight (pairs,) or numbers -> a number: inf at r = 1 (RoPE). Logits are right to eps nats after
    n_mix(eps / lam) steps, not n_mix(eps).
    """
    def mixed(n):
        return bool((f64(weight) * f64(r) ** n).sum() <= eps)

    never = 2 ** 40
    n = bisect_left(range(never), True, key=mixed)
    return n if n < never else math.inf


@check(2)
def phases_forget(g):
    angles, p = normal(g, 6), normal(g, 6).softmax(0)
    mean = p[TEXTS].prod(1) @ angles[TEXTS].sum(1).cos()
    yield "E cos(phase) = Re chi^n, all texts of 4 tokens", (chi_table(angles, p) ** 4).real, "=", mean

    still = chi_table(rope_steps(7, 64), full(7, 1 / 7)).abs()
    yield "! RoPE never mixes: r of a constant step", full(32, 1.0), "=", still

    r, weight = normal(g, 8).sigmoid(), normal(g, 8).softmax(0)
    n = mixing_time(r, 0.01, weight)
    left = (weight * r ** f64([[n], [n - 1]])).sum(1)
    yield "n_mix: first n with sum_b weight_b r_b^n <= .01", (left - 0.01).sign(), "=", [-1, 1]


def reflection_moments(n, d, cos):
    """(E s, E s^2) after n reflections I - 2ww', w uniform, |q| = |k| = 1, q.k = cos; limits 0 and 1/d.

    E M = (1 - 2/d) I, the largest gap of reflections of any law, since the trace of E ww' is 1. Symmetric
    traceless matrices shrink by (d-2)/(d+2) a step.
    """
    shrink = (d - 2) / (d + 2)
    return (1 - 2 / d) ** n * cos, 1 / d + shrink ** n * (cos ** 2 - 1 / d)


@check(2)
def reflections_mix(g):
    x = eye(8)[:, :1].expand(20000, 8, 1)
    for _ in range(6):
        x = mirror(normal(g, 20000, 8)) @ x
    s = (f64([0.6, 0.8, 0, 0, 0, 0, 0, 0]) @ x)[:, 0]
    first, second = reflection_moments(6, 8, 0.6)
    yield "E s = (1 - 2/d)^n q.k, 6 reflections", first, "~", s
    yield "E s^2 = 1/d + ((d-2)/(d+2))^n ((q.k)^2 - 1/d)", second, "~", s ** 2


def torus_gap(angles, p):
    """rho_2: |E s^2 - limit| <= rho_2^n |q|^2 |k|^2, for a table of angles (V, pairs), frequencies p (V,).

    It is the largest |chi| of the angles 2 a_b and a_b +- a_b', b != b'. The limit is that of independent
    uniform phases, sum_b |q_b|^2 |k_b|^2 / 2, not Haar's.
    """
    plus = chi_table(angles[:, :, None] + angles[:, None], p).abs()
    minus = chi_table(angles[:, :, None] - angles[:, None], p).abs()
    return max(plus.max(), (minus - 2 * eye(len(minus))).max())


@check(2)
def squares_need_a_gap_of_their_own(g):
    angles, p = normal(g, 5, 3), normal(g, 5).softmax(0)
    phase = angles[None, :, None].expand(1, 5, 6, 3)
    M = rotate(eye(6).expand(1, 5, 6, 6), phase)[0]         # of every token
    squares = torch.einsum("t,tab,tcd->acbd", p, M, M).reshape(36, 36)      # E[M x M]: d eigenvalues are 1
    sizes = torch.linalg.eigvals(squares).abs().sort(descending=True)[0]
    yield "rho_2: eigenvalue of E[M x M] next to 1", torus_gap(angles, p), "=", sizes[6]

    flip = math.pi * f64([[0, 0], [1, 1]])
    yield "! E M = 0 is not enough: M = +-I has rho_2 = 1", torus_gap(flip, full(2, 0.5)), "=", 1
    shared = normal(g, 5, 1).expand(5, 2)
    yield "! nor r < 1 where pairs share one angle: rho_2 = 1", torus_gap(shared, p), "=", 1


# -----------------------------------------------------------------------------------------------------------
# 3. Concentration of s = q.Pk, |q| = |k| = 1

def haar_tail(t, d):
    """P(s >= t) for P Haar on O(d) or SO(d), d >= 2, 0 <= t <= 1, exact: half the part of int cos^(d-2) over
    0 ... pi/2 that comes from asin t on, by Gauss-Legendre."""
    x, weight = map(f64, np.polynomial.legendre.leggauss(60))

    def integral(low):
        half = (math.pi / 2 - low) / 2
        angle = low + half * (x + 1)
        return half * (weight * angle.cos() ** (d - 2)).sum()
    return 0.5 * integral(math.asin(t)) / integral(0.0)


def haar_tail_bound(t, d):
    """P(s >= t) <= 1/2 (1 - t^2)^((d-1)/2) <= 1/2 e^(-(d-1) t^2/2), from the area of a cap."""
    return 0.5 * (1 - t * t) ** ((d - 1) / 2)


def levy_bound(t, d):
    """Levy's lemma (quoted): P(f >= E f + t) <= e^(-(d-1) t^2/2), f on the unit sphere, Lipschitz constant 1.
    It does not use that s is linear: valid, but far from sharp."""
    return math.exp(-(d - 1) * t * t / 2)


@check(3)
def haar_steps_concentrate(g):
    t = np.linspace(0, 0.999, 20)
    formula = f64([haar_tail(x, 3) for x in t])
    yield "P(s >= t) = (1 - t)/2, d = 3 (Archimedes)", formula, "=", (1 - t) / 2
    cases = [(x, d) for x in t for d in (2, 3, 4, 5, 8)]
    exact = f64([haar_tail(*case) for case in cases])
    bound = f64([haar_tail_bound(*case) for case in cases])
    yield "P(s >= t) <= 1/2 (1-t^2)^((d-1)/2), d <= 8", bound, ">=", exact, 3.5
    exact = haar_tail(0.5, 64)
    yield "... d = 64, t = .5: 5.2 times too large", haar_tail_bound(0.5, 64), ">=", exact, 5.3
    yield "! Levy's lemma, e^(-(d-1)t^2/2): 34 times too large", levy_bound(0.5, 64), ">=", exact, 35


def pairs_tail(t, r):
    """P(S >= mean + t) <= e^(-t^2/2R): S = sum_b r_b cos(phase_b), independent pairs, R = sum r_b^2.

    Any law, any number of steps, mean = sum r_b |chi_b|^n (Hoeffding). For uniform phases the exponent is
    twice that, by I_0(x) <= e^(x^2/4). Energy must be spread: d is replaced by 2 (sum r_b)^2 / R.
    """
    return torch.exp(-t * t / (2 * (r ** 2).sum()))


@check(3)
def independent_pairs_concentrate(g):
    exponent = -pairs_tail(0.2, full(1, 1.0)).log()         # -log P / pairs, for angles 0 and pi by Cramer
    exact = (1.2 * math.log(1.2) + 0.8 * math.log(0.8)) / 2
    yield "P(S >= mean + t) <= e^(-t^2/2R), any law: exponent", exponent, "<=", exact, 1.02
    yield "! not e^(-t^2/R) for all: angles 0 and pi", exact, "<", 2 * exponent

    alone = math.acos(0.8) / math.pi
    yield "! energy in one pair, or one angle for all: P(s >= .8)", haar_tail_bound(0.8, 64), "<", alone


# -----------------------------------------------------------------------------------------------------------
# 4. Score gap. Far tokens lie on one path, so they may depend on each other in any way

def route_bound(steps):
    """Near routes: |q.Pk - q.k| <= sum_t ||M_t - I|| |q||k|, for the steps (n, d, d) in between.

    Few steps, close to I, keep high scores high. Reflections are never close to I, but E s = (1 - 2/d)^n q.k.
    """
    return torch.linalg.matrix_norm(steps - eye(steps.size(-1)), 2).sum()


def far_threshold_haar(far, delta, d):
    """All `far` logits are <= lam times this with probability 1 - delta: union bound over haar_tail_bound.

    It grows with their number: no gap has high probability at every length. What does not depend on the
    length is an expectation, far_partition.
    """
    return math.sqrt(1 - (2 * delta / far) ** (2 / (d - 1)))


def far_threshold_pairs(far, delta, lam_pairs, mean=0.0):
    """All `far` logits are <= this with probability 1 - delta: union bound over pairs_tail."""
    return mean + math.sqrt(2 * (lam_pairs ** 2).sum() * math.log(far / delta))


def far_partition(lam_pairs):
    """Phi = E e^logit of a far token = prod_b I_0(lam_b) <= e^(sum lam_b^2 / 4) at any length, phases mixed.

    It pins the far mass: E rho <= far Phi / (far Phi + Z_near), Z_near the sum of e^logit over near tokens.
    """
    return torch.special.i0(lam_pairs).prod(-1)


@check(4)
def near_scores_stay_above_far_ones(g):
    turn = torch.linalg.matrix_exp(f64([[0, -0.02], [0.02, 0]]))
    bound = route_bound(turn.expand(8, 2, 2))               # q and k at a right angle: s = sin(8 * .02)
    yield "|q.Pk - q.k| <= sum ||M_t - I|| |q||k|, 8 small turns", bound, ">=", math.sin(0.16), 1.01

    union = 65536 * haar_tail_bound(far_threshold_haar(65536, 0.1, 64), 64)
    yield "P(a far logit > threshold) <= delta, haar_tail_bound", 0.1, "=", union
    above = 1 - (1 - haar_tail(far_threshold_haar(100, 0.05, 8), 8)) ** 4096        # independent tokens
    yield "! threshold of 100 tokens at 4,096: no gap for all lengths", 0.05, "<", above
    lam_pairs = normal(g, 8)
    union = 4096 * pairs_tail(far_threshold_pairs(4096, 0.05, lam_pairs, 0.3) - 0.3, lam_pairs)
    yield "P(a far logit > threshold) <= delta, pairs_tail", 0.05, "=", union

    lam_pairs = f64([0.3, 1.0, 3.0])
    _, weight = quadrature(lam_pairs)
    mean = weight.mean(1).prod()
    yield "E e^logit = Phi = prod_b I_0(lam_b) (quadrature)", far_partition(lam_pairs), "=", mean

    lam_pairs, far, Z_near = full(32, 0.25), 2048, 4 * math.exp(6)      # d = 64, lam = 8
    Phi = far_partition(lam_pairs)
    yield "Phi <= e^(sum lam_b^2 / 4)", math.exp(0.5), ">=", Phi, 1.01
    logits = (lam_pairs * walk(g, 30, far, 32).cos()).sum(-1)
    rho = far_mass(logits.exp().sum(-1), Z_near)
    yield "E rho <= far Phi / (far Phi + Z_near)", far_mass(far * Phi, Z_near), ">=", rho, 1.05


# -----------------------------------------------------------------------------------------------------------
# 5. Far mass

def far_mass(far, near, gap=0.0):
    """rho = far / (far + near e^gap), for numbers of tokens or sums of e^logit. It is an identity for the gap

        Delta_eff = logmeanexp(near logits) - logmeanexp(far logits),

    so a lower bound for 2 lam (equality: near +lam, far -lam) or, sharper, for max near - mean far (Jensen).
    The theory says that Delta_eff does not depend on the length: then one length predicts all. The near
    coefficient 1 - rho, the weight of the near tokens' output, goes to 0 for any gap, values carried or not.
    """
    return torch.sigmoid(torch.log(f64(far) / f64(near)) - f64(gap))


@check(5)
def attention_drifts_to_far_tokens(g):
    logits = 2 * normal(g, 500, 58)
    near, far = logits[:, :8], logits[:, 8:]
    rho = logits.softmax(-1)[:, 8:].sum(-1)
    effective = near.exp().mean(-1).log() - far.exp().mean(-1).log()
    yield "rho = far / (far + near e^Delta_eff)", far_mass(50, 8, effective), "=", rho
    yield "rho >= that with max near - mean far", far_mass(50, 8, near.amax(-1) - far.mean(-1)), "<=", rho

    weights = torch.cat((full(64, 8.0), full(65472, -8.0))).softmax(0)
    yield "rho >= that with 2 lam; = for near +8, far -8", far_mass(65472, 64, 16), "=", weights[64:].sum()
    left = 1 - far_mass(1e9, 64, 4)
    yield "! 1 - rho goes to 0, as near e^gap/far: far = 1e9, gap 4", 64e-9 * math.exp(4), ">=", left, 1.001
    yield "! lam = 8 forces 1/2 only far beyond 65,536: 5.68e8 tokens", far_mass(5.68e8, 64, 16), "<", 0.5


def scaled_gap(c, near, lam_pairs):
    """Delta_eff of logits times c, where near ones are all `near` and far ones mixed: c near - ln Phi(c lam).

    At least c near - c^2 V/4, V = sum lam_b^2: logits times c help up to about c = 2 near/V, and then harm,
    since the spread of far logits counts as its square. With c = ln L/ln L_train (logn) the far mass stops
    growing just beyond L_train if near - V/2 >= ln L_train: the slope of the gap, against that of ln L.
    """
    return c * near - far_partition(c * lam_pairs).log()


@check(5)
def scaled_logits_hold_attention_if_the_gap_is_wide(g):
    lam_pairs, c = full(32, 0.25), f64([1.0, 1.5, 2.0, 3.0])
    gaps = torch.stack([scaled_gap(scale, 6.0, lam_pairs) for scale in c])
    yield "logits times c: Delta_eff >= c near - c^2 V/4", 6 * c - 0.5 * c ** 2, "<=", gaps, 1.02
    twice, once = [scaled_gap(c, 1.5, lam_pairs) for c in (6.0, 3.0)]
    yield "! beyond c = 2 near/V it harms: near 1.5, c from 3 to 6", twice, "<", once

    length = 512 * f64([1.0, 1.001])
    scale = length.log() / math.log(512)
    wide = torch.stack([scaled_gap(x, 1.0 + math.log(512) + 2 * 0.5, lam_pairs) for x in scale])
    narrow = torch.stack([scaled_gap(x, 3.0, lam_pairs) for x in scale])
    held = [far_mass(length - 64, 64, gap).diff().sign() for gap in (wide, narrow)]
    yield "logn holds rho where near - V/2 > ln L_train, else not", torch.cat(held), "=", [-1, 1]


# -----------------------------------------------------------------------------------------------------------
# 6. Distance bias: logits s + bias(n), |s| <= lam; near tokens have n < near, far ones near <= n < length

def bias_far_bound(bias, near, lam):
    """Any bias (length,): rho <= R / (1 + R), R = e^(2 lam) sum_far e^bias / sum_near e^bias; tight.

    It stays below 1 at every length iff sum e^bias converges: not for -ln n, nor where it saturates (T5).
    Forget gates with log f_t <= -slope at every token hold at least as much as ALiBi.
    """
    gap = bias[:near].logsumexp(0) - bias[near:].logsumexp(0)
    return torch.sigmoid(2 * lam - gap)


def biased_partition(lam_pairs, slope, near, length=math.inf):
    """E Z_far of mixed rotations with ALiBi, Phi sum_far e^(-slope n): finite at any length.

    So E rho <= E Z_far / (E Z_far + Z_near) holds with no log of the length. A rotation leaves the bound
    above as it is, since |s| <= lam either way.
    """
    far = math.exp(-slope * near) - math.exp(-slope * length)
    return far_partition(lam_pairs) * far / -math.expm1(-slope)


@check(6)
def a_distance_bias_holds_attention(g):
    n, bias = torch.arange(300, dtype=torch.float64), normal(g, 300)
    worst = torch.where(n < 20, -2.0, 2.0)
    rho = (worst + bias).softmax(0)[20:].sum()
    yield "any bias: rho <= R/(1+R); = for far +lam, near -lam", bias_far_bound(bias, 20, 2.0), "=", rho

    closed = 1 / (1 + math.exp(-4) * math.expm1(0.05 * 20))
    rho = bias_far_bound(-0.05 * n, 20, 2.0)
    yield "ALiBi: rho <= 1/(1 + e^(-2 lam) (e^(slope near) - 1))", closed, ">=", rho, 1.01
    lam_pairs = normal(g, 8)
    Z_far = (far_partition(lam_pairs) * (-0.05 * n[20:]).exp()).sum()
    formula = biased_partition(lam_pairs, 0.05, 20, 300)
    yield "rotation and ALiBi: E Z_far = Phi sum e^(-slope n)", formula, "=", Z_far


# -----------------------------------------------------------------------------------------------------------
# 7. Values: far output O = sum_j alpha_j P_{j->i} v_j, v_j = c + noise_j; the background c they share adds up

def value_gain(r):
    """kappa = (1+r)/(1-r): E |sum alpha_j P_j c|^2 <= kappa |c|^2 sum alpha^2, alpha independent of steps.

    Steps need not commute: P_k' P_j = P_{j->k} for any orthogonal ones (reflections: kappa = d - 1). If c is
    drawn from N(0, S), the covariance of the sum has a norm of at most kappa sum alpha^2 times that of S.
    """
    return (1 + f64(r)) / (1 - f64(r))


def value_moment(alpha, chi):
    """E |sum alpha_j P_j c|^2 / |c|^2 = sum_jk alpha_j alpha_k Re chi^|j-k|; reflections: chi = 1 - 2/d."""
    n = torch.arange(len(alpha))
    correlation = torch.as_tensor(chi, dtype=torch.complex128) ** (n[:, None] - n).abs()
    return alpha @ correlation.real @ alpha


@check(7)
def carried_values_decohere(g):
    other = torch.linalg.qr(normal(g, 3, 3)).Q
    mirrors = mirror(torch.cat((eye(3), other)))            # E M = (1 - 2/3) I
    alpha, carried = full(5, 0.2), 0.2 * eye(3)
    for token in TEXTS.T:
        carried = mirrors[token] @ carried + 0.2 * eye(3)
    square = (carried[:, :, 0] ** 2).sum(-1).mean()
    yield "! steps need not commute: reflections, chi = 1 - 2/d", value_moment(alpha, 1 / 3), "=", square
    shared = torch.diag(f64([1.0, 1.0, 0.8]))
    norm = torch.linalg.matrix_norm((carried @ shared @ carried.mT).mean(0), 2)
    bound = value_gain(1 / 3) * (alpha ** 2).sum() * torch.linalg.matrix_norm(shared, 2)
    yield "background N(0, S): ||cov|| <= kappa sum alpha^2 ||S||", bound, ">=", norm, 1.35

    dirichlet = (math.sin(200) / math.sin(1) / 200) ** 2
    moment = value_moment(full(200, 1 / 200), exp_i(2))
    yield "! RoPE's values decohere too (r = 1): Dirichlet kernel", moment, "=", dirichlet


def value_floor(lam_pairs):
    """Coherence left at any length where the same phases drive the weights, for far tokens that share a key:
    |sum alpha_j e^(i phase_j,b)| / rho -> I_1/I_0(lam_b), about lam_b / 2."""
    return torch.special.i1e(lam_pairs) / torch.special.i0e(lam_pairs)


def far_output(c2, coherent, gain, n_eff, noise=0.0):
    """E |O|^2 / rho^2 ~ sum_b c2_b min(1, coherent_b^2 + gain_b/n_eff) + noise/n_eff.

    c2 = |c_b|^2 (..., pairs), noise = E |noise_j|^2, n_eff = (sum alpha)^2 / sum alpha^2. coherent: 1 for
    values that stay, 0 for values carried by angles of their own, value_floor for the keys' angles (then up
    to 35 % too large in simulations, more with drift).
    """
    kept = (coherent ** 2 + gain / n_eff[..., None]).clamp(max=1)
    return (c2 * kept).sum(-1) + noise / n_eff


@check(7)
def what_is_left_of_far_output(g):
    lam_pairs = f64([0.3, 1.0, 3.0])
    x, weight = quadrature(lam_pairs)
    left = (weight * x).mean(1) / weight.mean(1)
    yield "coherence left: I_1/I_0(lam_b) (quadrature)", value_floor(lam_pairs), "=", left

    c2, n_eff = full(1, 4.0), f64(500.0)
    bound = far_output(c2, 0.0, value_gain(0.8), n_eff)
    own = 4 * value_moment(full(500, 0.002), 0.8)
    yield "angles of their own: |O|^2 <= |c|^2 kappa/n_eff", bound, ">=", own, 1.01
    yield "r = 1: all of |c|^2", far_output(c2, 0.0, math.inf, n_eff), "=", 4
    alpha = normal(g, 100).softmax(0)
    stay = ((2 + 3 * normal(g, 10000, 100)) @ alpha) ** 2
    formula = far_output(c2, 1.0, 0.0, 1 / (alpha ** 2).sum(), 9.0)
    yield "values that stay: |c|^2 + E |noise|^2/n_eff", formula, "~", stay

    lam_pairs, phase = full(8, 0.8), walk(g, 20, 4000, 8)
    alpha = (lam_pairs * phase.cos()).sum(-1).softmax(1)
    output = exp_i(phase.mT) @ (alpha + 0j)[..., None]
    square = (output.abs() ** 2).sum((1, 2))
    n_eff = 1 / (alpha ** 2).sum(1)
    formula = far_output(full(8, 1.0), value_floor(lam_pairs), value_gain(math.exp(-1 / 8)), n_eff).mean()
    yield "! the keys' angles: a floor, |c|^2 (floor^2 + kappa/n_eff)", formula, ">=", square, 1.35


def output_angle(rho, size, d):
    """Angle between an output o = (1 - rho) n + rho f and its near part n, in radians:
    tan^2 = (rho/(1 - rho))^2 size^2 (1 - 1/d).

    f has mean zero, in all directions alike; size^2 = E |f|^2/|n|^2, for instance from far_output. |o - n| is
    at least rho |n| on average, however small f is. Normalised, they differ by 2 sin(angle/2) alone: a norm
    after attention mends what far mass does to the size of the near part, if far values are incoherent.
    """
    return torch.atan(f64(rho) / (1 - f64(rho)) * f64(size) * math.sqrt(1 - 1 / d))


@check(7)
def a_norm_keeps_the_direction(g):
    near, d = F.normalize(normal(g, 8), dim=0), 8
    weight, phase = normal(g, 60).softmax(0), 2 * math.pi * torch.rand(4000, 60, 4, generator=g)
    carried = 0.35 * (weight[:, None] * exp_i(phase)).sum(1)                 # mixed, |c_b| = .35 in 4 pairs
    output = 0.3 * near + 0.7 * torch.cat((carried.real, carried.imag), dim=-1)

    aside = (output - (output @ near)[:, None] * near).square().sum(-1)
    size = 0.7 * weight.square().sum().sqrt()
    tangent = 0.3 * output_angle(0.7, size, d).tan()
    yield "angle of o and its near part: tan = rho/(1-rho) |f|/|n|", tangent ** 2, "~", aside
    apart = (output - near).square().sum(-1)
    yield "! without a norm |o - n| >= rho |n|, incoherent or not", 0.49, "<=", apart, 1.2


# -----------------------------------------------------------------------------------------------------------
# A trained model, measured at the same query tokens for every length

QUERIES = 32      # measured per head and stretch of text
AT_ONCE = 1024    # queries at a time where all are measured
TOLERANCE = 0.1   # nats: phases have mixed when the mean logit is this close to its limit
FAR = {"far_mass": ".4f", "predicted": ".4f", "mean_far": ".4f", "worst_case": ".1e", "gap": ".2f",
       "coherence": ".3f", "expected": ".3f", "n_eff^-.5": ".3f", "angle": ".2f", "exp_angle": ".2f"}
CAUSES = [   # name, weight of the far part, is the near part made whole?
    ("as it is", 1, False), ("far zeroed", 0, False), ("near whole", 1, True), ("both", 0, True),
]


def layer_inputs(model, idx):
    """What `attend` takes in each layer, on token ids (1, T): q, k, v (1, H, T, d), two transports or None,
    key bias (1, H, T) or None."""
    x = model.wte(idx)
    shared = model.transport(idx, x)
    for block in model.h:
        yield block.attn.inputs(block.ln_1(x), idx, shared)
        x = block(x, idx, shared)


def pairs_of(x):
    """Lengths of channel pairs: (..., d) -> (..., d/2); of an odd d the last channel stands alone."""
    x = F.pad(x, (0, x.size(-1) % 2))
    return x.unflatten(-1, (2, -1)).norm(dim=-2)


def measured_r(phase):
    """|E exp(i angle)| of a text's steps, from phases (H|1, T, pairs) -> (H|1, pairs).

    The mean over places weights a table by token frequency. What N random numbers leave is taken off.
    """
    steps = phase.double().diff(dim=1)
    square = exp_i(steps).mean(1).abs() ** 2
    return (square - (1 - square) / steps.size(1)).clamp(0, 1).sqrt()


def mixing(layers, context):
    """How a model's steps mix, from its layers' inputs on a text -> dict, nan for steps without angles.

    r is weighted by the energy |q_b||k_b| of pairs, n_mix is the slowest head's, unmixed the part of the
    energy in pairs that are not mixed after `context` steps.
    """
    r, energy = [], []
    for q, k, _, transport, *_ in layers:
        if not isinstance(transport, Rotation | None):
            return dict.fromkeys(("r", "n_mix", "unmixed"), math.nan)
        lam_pairs = pairs_of(q[0]).mean(1) * pairs_of(k[0]).mean(1)
        energy.append(lam_pairs / math.sqrt(q.size(-1)))
        still = torch.ones_like(lam_pairs)
        r.append(still if transport is None else still * measured_r(transport.phase[0]))

    r, energy = torch.cat(r).cpu(), torch.cat(energy).cpu().double()        # (layers H, pairs)
    weight = energy / energy.sum()
    left = energy.sum(-1, keepdim=True) * r ** context
    times = [mixing_time(r_head, TOLERANCE, lam_pairs) for r_head, lam_pairs in zip(r, energy)]
    return {
        "r": float((weight * r).sum()),
        "n_mix": max(times),
        "unmixed": float(weight[left > TOLERANCE].sum()),
    }


def path_products(q, k, path, rows):
    """q_i . H_i ... H_{j+1} k_j of PaTH, for the queries in rows (Q,), ascending, and keys j <= i.

    q, k (1, H, T, d) -> (1, H, Q, T). As in path_attention, keys are carried on from segment to segment.
    """
    products = []
    for now, logits, q_start, far_k, _ in path_segments(q, k, path.w, path.beta, k[:, :, :0]):
        mine = rows[(rows >= now.start) & (rows < now.stop)] - now.start
        to_all = torch.cat((q_start[:, :, mine] @ far_k.mT, logits[:, :, mine]), dim=-1)
        products.append(F.pad(to_all, (0, k.size(2) - to_all.size(-1))))
    return torch.cat(products, dim=2)


def query_logits(layer, rows):
    """Logits of the queries in rows (Q,) to all keys, later ones too: (H, Q, T) float64."""
    q, k, _, transport, _, key_bias = layer
    if hasattr(transport, "attend"):                        # PaTH cannot encode
        products = path_products(q, k, transport, rows)
    elif transport is None:
        products = q[:, :, rows] @ k.mT
    else:
        products = transport.encode(q)[:, :, rows] @ transport.encode(k).mT

    logits = products[0].double() / math.sqrt(q.size(-1))
    if key_bias is not None:
        logits = logits + key_bias[0, :, None] - key_bias[0][:, rows, None]
    return logits


def split_logits(layer, rows, near):
    """Logits (H, Q, T) of the queries in rows (Q,): first those to keys nearer than `near` tokens, then those
    to the others; -inf elsewhere."""
    logits = query_logits(layer, rows)
    distance = rows[:, None] - torch.arange(logits.size(-1), device=rows.device)
    near_logits = logits.masked_fill((distance < 0) | (distance >= near), -math.inf)
    return near_logits, logits.masked_fill(distance < near, -math.inf)


def measured_gap(near_logits, far_logits):
    """Delta_eff (H, Q): logmeanexp of near logits minus that of far ones."""
    means = [x.logsumexp(-1) - x.isfinite().sum(-1).double().log() for x in (near_logits, far_logits)]
    return means[0] - means[1]


def far_statistics(layer, rows, near):
    """Attention of the queries in rows (Q,), ascending and >= near, to far keys: `near` or more tokens away.

    Logits are Q x T a head; nothing is T x T. -> dict of tensors (H, Q).
    """
    q, k, v, _, value_transport, key_bias = layer
    near_logits, far_logits = split_logits(layer, rows, near)
    gap = measured_gap(near_logits, far_logits)
    far = (rows + 1 - near).double()                        # how many
    far_mean = far_logits.nan_to_num(neginf=0.0).sum(-1) / far

    longest = k[0].norm(dim=-1).amax(-1, keepdim=True)
    spread = 2 * q[0][:, rows].norm(dim=-1) * longest / math.sqrt(q.size(-1))
    if key_bias is not None:                                # it may rise
        spread = spread + key_bias[0][:, rows] - key_bias[0][:, :1]

    alpha = far_logits.softmax(-1).to(v.dtype)              # weights over rho
    carried = v[0] if value_transport is None else value_transport.encode(v)[0]
    size = (alpha @ v[0].norm(dim=-1, keepdim=True))[..., 0]
    n_eff = 1 / alpha.square().sum(-1)
    expected = expected_output(layer, carried, rows, near, n_eff)
    rho = far_mass(far, near, gap)
    near_part, far_part = near_logits.softmax(-1).to(v.dtype) @ carried, alpha @ carried
    output = (1 - rho)[..., None] * near_part + rho[..., None] * far_part
    return {
        "gap": gap,
        "far_mass": rho,
        "mean_far": far_mass(far, near, near_logits.amax(-1) - far_mean),
        "worst_case": far_mass(far, near, spread),
        "coherence": far_part.norm(dim=-1) / size,
        "expected": expected / size,
        "n_eff^-.5": n_eff.rsqrt(),
        "angle": torch.acos(F.cosine_similarity(output, near_part, dim=-1).clamp(-1, 1)),
        "exp_angle": output_angle(rho, expected / near_part.norm(dim=-1), v.size(-1)),
    }


def expected_output(layer, carried, rows, near, n_eff):
    """far_output's root (H, Q) for n_eff (H, Q), from what the keys that are far from all queries share.

    Values that stay, and those that reflections carry, are taken as they are in the frame of attention.
    """
    q, k, v, transport, value_transport, _ = layer
    old = slice(0, int(rows[0]) - near + 1)
    coherent, gain, values = f64(1.0), 0.0, carried[:, old]
    if isinstance(value_transport, Rotation):
        coherent, values = f64(0.0), v[0, :, old]
        gain = value_gain(measured_r(value_transport.phase[0]))[:, None]
        if value_transport is transport:
            key = k[0, :, old].mean(1, keepdim=True)
            lam_pairs = pairs_of(q[0][:, rows]) * pairs_of(key)
            coherent = value_floor(lam_pairs / math.sqrt(q.size(-1)))

    c2 = pairs_of(values.mean(1))[:, None] ** 2
    noise = values.var(1, correction=0).sum(-1, keepdim=True)
    return far_output(c2, coherent, gain, n_eff, noise).sqrt()


def split_output(layer, near):
    """A layer's output as its near and its far part (1, H, T, d), and the near mass 1 - rho (1, H, T, 1).

    Logits are AT_ONCE x T a head.
    """
    _, _, v, _, value_transport, _ = layer
    values = v if value_transport is None else value_transport.encode(v)
    parts = []
    for rows in torch.arange(v.size(2), device=v.device).split(AT_ONCE):
        near_logits, far_logits = split_logits(layer, rows, near)
        weights = torch.maximum(near_logits, far_logits).softmax(-1).to(v.dtype)[None]
        near_weights = weights * near_logits.isfinite()
        far_part = (weights - near_weights) @ values
        parts.append((near_weights @ values, far_part, near_weights.sum(-1, keepdim=True)))
    near_part, far_part, near_mass = [torch.cat(part, dim=2) for part in zip(*parts)]
    if value_transport is not None:
        near_part, far_part = value_transport.decode(near_part), value_transport.decode(far_part)
    return near_part, far_part, near_mass


def growth(model, rows, first_rows):
    """By what the model scales logits of the queries in rows more than those in first_rows: 1 if it does not.

    The scales of SCHEMES depend on places alone, but for a factor that cancels.
    """
    parts = [part for part in model.modules() if isinstance(part, Transport) and hasattr(part, "scale")]
    if not parts:
        return torch.ones_like(rows, dtype=torch.float64)
    idx = torch.zeros(1, int(rows[-1]) + 1, dtype=torch.long, device=rows.device)
    scale = parts[0].scale(idx, f64(0.0), {})[0, 0]
    return scale[rows] / scale[first_rows]


def causes(model, text, near, targets):
    """Mean loss (nats) of the last targets of text (T + 1,), with the far part of attention kept or zeroed in
    all layers, and the near part, (1 - rho) n, left as it is or made whole, n -> dict by names of CAUSES."""
    idx, losses = text[None, :-1], {}
    for name, keep_far, whole in CAUSES:
        x = model.wte(idx)
        shared = model.transport(idx, x)
        for block in model.h:
            normed = block.ln_1(x)
            near_part, far_part, near_mass = split_output(block.attn.inputs(normed, idx, shared), near)
            if whole:
                near_part = near_part / near_mass
            x = x + block.attn.output(near_part + keep_far * far_part, normed)
            x = x + block.mlp(block.ln_2(x))
        last = model.ln_f(x)[0, -targets:]
        losses[name] = float(model.rows_nll(last, text[-targets:]).mean())
    return losses


@torch.no_grad()
def measure(run, args):
    """Measure a run, print and write run/theory.json -> its dict. Means are over text, layers and heads."""
    device = torch.device(pick_device(args.device))
    model, val, about = load_run(run, device, args.logn, args.length)
    context = about["train_context"]
    if not 16 <= context <= args.length or args.stretches < 1:
        raise ValueError(f"{run}: needs a training context ({context}) of 16 or more, --length {args.length} "
                         f"no shorter, --stretches {args.stretches} 1 or more")
    if args.causes and not context <= args.causes <= args.length:
        raise ValueError(f"--causes {args.causes} must be from {context}, the training context, to --length")

    stretches = spread_evenly(val, args.stretches, args.length).astype(np.int64)
    stretches, near = torch.from_numpy(stretches).to(device), context // 4
    far = far_by_length(model, stretches, context, near, run.name)
    result = about | {"near": near, "stretches": len(stretches)}
    result |= mixing(layer_inputs(model, stretches[:1, :-1]), context) | {"far": far}
    if args.causes:
        losses = [causes(model, text[-args.causes - 1:], near, context) for text in stretches]
        mean = {name: float(np.mean([loss[name] for loss in losses])) for name, *_ in CAUSES}
        result["causes"] = {"context": args.causes} | mean
    print_result(result)                                    # first, since the folder may be read-only
    data.write_json(run / "theory.json", for_json(result))
    return result


def far_by_length(model, stretches, context, near, label):
    """far_statistics of the same QUERIES tokens of stretches (n, longest + 1), after more and more text.

    -> a dict of means for every length from the training context on; "predicted" is by that one's logits.
    """
    lengths = parse_lengths("", context, stretches.size(1) - 1)
    progress = Progress(model, label, [(length, length) for length in lengths for _ in stretches])
    first_rows = torch.linspace(context - context // 2, context - 1, QUERIES, device=stretches.device).long()
    far, first = [], []                                     # first: logits at the training context
    for length in lengths:
        rows, found = first_rows + length - context, []
        for text in stretches:
            for layer in layer_inputs(model, text[None, -length - 1:-1]):
                found.append(far_statistics(layer, rows, near))
                if length == context:
                    first.append(split_logits(layer, rows, near))
            progress.tick(length, length)

        values = {key: torch.stack([layer[key] for layer in found]) for key in found[0]}
        scale = growth(model, rows, first_rows)[:, None]
        gap = torch.stack([measured_gap(scale * near_logits, scale * far_logits)
                           for near_logits, far_logits in first])
        values["predicted"] = far_mass(rows + 1 - near, near, gap)
        far.append({"context": length} | {key: float(values[key].mean()) for key in FAR})
    return far


def show(title, rows, columns):
    """Print a table: a line per dict of rows, a column per key with its format."""
    print(f"\n{title}\n" + " ".join(f"{key:>10}" for key in columns))
    for row in rows:
        print(" ".join(f"{row[key]:>10{spec}}" for key, spec in columns.items()))


def print_result(result):
    context, near = result["train_context"], result["near"]
    print(f"\n{result['run']}: {result['pos']}, iter {result['iter_num']:,}, trained at {context} tokens; "
          f"{result['data']}: {result['stretches']} x {QUERIES} queries")
    print(f"steps: r {result['r']:.3f} by energy; the slowest head mixes to {TOLERANCE} nats in "
          f"{result['n_mix']:,}; {result['unmixed']:.0%} of the energy has not mixed after {context}")
    title = f"far mass, from {near} tokens (predicted: gap of {context}; bounds mean_far, worst_case)"
    show(title, result["far"], {"context": ","} | FAR)
    if "causes" in result:
        title = f"loss (nats) of the last {context} tokens, by what attention reads"
        show(title, [result["causes"]], {"context": ","} | {name: ".3f" for name, *_ in CAUSES})


def plot(results):
    """Far mass and coherence of the far output against context length -> Figure, to be shown 880 px wide."""
    plt = pyplot()
    plt.rcParams["font.size"] = 10                          # 13.9 px
    fig, axes = plt.subplots(2, 1, figsize=(8.8, 8), dpi=200, sharex=True)
    panels = (("far mass (dashed: predicted)", "far_mass", "predicted"),
              ("coherence of far output (dashed: expected)", "coherence", "expected"))
    for ax, (title, measured, theory) in zip(axes, panels):
        ends = []
        for i, result in enumerate(results):
            contexts = [row["context"] for row in result["far"]]
            for key, style in ((measured, "-"), (theory, "--")):
                ax.semilogx(contexts, [row[key] for row in result["far"]], style, base=4, color=f"C{i}")
            ends.append((result["run"], result["far"][-1][measured], f"C{i}"))
        ax.set(ylabel=title, ylim=(0, 1))
        ax.grid(alpha=0.3)
        label_ends(ax, ends)
    axes[-1].set(xlabel="context length (tokens)")
    axes[-1].xaxis.set_major_formatter("{x:,.0f}")
    fig.tight_layout()
    return fig


def main(argv=None):
    parser = data.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("runs", nargs="*", metavar="RUN", help="folders with a ckpt.pt (default: check the statements)")
    option("--seed", type=int, default=0, help="of the checks' random numbers")
    option("--length", type=int, default=65536, help="longest context to measure (default 65,536)")
    option("--stretches", type=int, default=4, help="stretches of validation text to measure (default 4)")
    option("--causes", type=int, default=0, metavar="N", help="at N tokens, also zero the far part of "
           "attention and make the near part whole (all logits are computed, N x N)")
    option("--logn", action="store_true", help="scale logits by max(1, ln i / ln of the training context)")
    option("--device", default="auto", help="cpu, cuda, cuda:1, ...")
    option("--plot", action="store_true", help="draw out/theory.png (needs matplotlib)")
    args = parser.parse_args(argv)
    if not args.runs:
        rows = list(table(args.seed))
        shown = [row | {"holds": "yes" if row["holds"] else "NO"} for row in rows]
        show(f"seed {args.seed}; !: what a summary leaves out", shown, TABLE)
        print(f"{sum(row['holds'] for row in rows)} of {len(rows)} hold")
        raise SystemExit(not all(row["holds"] for row in rows))

    with data.one_line_errors():
        if args.plot:
            pyplot()                                        # before the work, not after it
        runs = [Path(run) for run in args.runs]
        for run in runs[1:]:                                # of which one may not fit, found before the work
            load_run(run, "cpu", args.logn, args.length)
        results = [measure(run, args) for run in runs]
        if args.plot:
            save_figure(plot(results), Path("out/theory.png"))


if __name__ == "__main__":
    main()
