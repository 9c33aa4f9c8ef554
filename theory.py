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
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

import data
from eval_extrapolate import Progress, check_runs, finite, pyplot
from model import load_model
from train import pick_device
from transport import Rotation, in_chunks, rope_steps, rotate, ut_transform

CHECKS = []   # (section, check) in the order of this file
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

    worst = (room / formula.abs().clamp(min=1e-30)).argmin()
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


def uniform(g, *shape):
    return torch.rand(*shape, generator=g, dtype=torch.float64)


def sphere(g, *shape):
    """Uniform unit vectors in the last dimension."""
    return F.normalize(normal(g, *shape), dim=-1)


def walk(g, paths, length, pairs):
    """Phases (paths, length, pairs) of N(0, 1/4) angles, so that r = exp(-1/8), at distances from 120 on."""
    angles = 0.5 * normal(g, paths, length, pairs)
    angles[:, 0] *= math.sqrt(120)
    return angles.cumsum(1)


def reflected(g, x, n):
    """Vectors x (N, d) after n reflections each, uniform w."""
    for _ in range(n):
        w = sphere(g, *x.shape)
        x = x - 2 * (x * w).sum(-1, keepdim=True) * w
    return x


def mirror(w):
    """Reflections I - 2 ww' of unit vectors: (..., d) -> (..., d, d)."""
    return eye(w.size(-1)) - 2 * w[..., :, None] * w[..., None, :]


def eye(d):
    return torch.eye(d, dtype=torch.float64)


def full(n, x):
    return torch.full((n,), x, dtype=torch.float64)


def count(n):
    return torch.arange(1, n + 1, dtype=torch.float64)


def zipf(n):
    """Token frequencies proportional to 1/rank."""
    weight = 1 / count(n)
    return weight / weight.sum()


def texts(tokens, length):
    """All texts of a length over a vocabulary: (tokens ** length, length) ids."""
    return torch.cartesian_prod(*[torch.arange(tokens)] * length)


def circle(points):
    """Evenly spaced angles: means over them are exact for trigonometric polynomials."""
    return 2 * math.pi / points * count(points)


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
    steps = mirror(sphere(g, 12, 6))
    C = cumulative(steps)
    path = steps[9] @ steps[8] @ steps[7]
    yield "M_i M_{i-1} ... M_{j+1} = C_i C_j', reflections", C[9] @ C[6].mT, "=", path

    C = cumulative(0.25 * eye(4) + 0.75 * mirror(sphere(g, 9, 4)))
    error = (C[8] @ (C[3].inverse() - C[3].mT)).abs().max()
    yield "! not for I - beta ww', beta < 2: error of C_j'", 0.01, "<", error


# -----------------------------------------------------------------------------------------------------------
# 2. Spectral gap and mixing: E P = (E M)^n, so |E s| <= r^n |q||k|

def chi_table(angles, p):
    """chi of a table: angles (V, ...), token frequencies p (V,) -> complex (...)."""
    return torch.tensordot(p.to(torch.complex128), exp_i(angles), 1)


@check(2)
def phases_forget(g):
    angles, p, text = normal(g, 6), zipf(6), texts(6, 4)
    mean = p[text].prod(1) @ angles[text].sum(1).cos()
    yield "E cos(phase) = Re chi^n, all texts of 4 tokens", (chi_table(angles, p) ** 4).real, "=", mean

    still = chi_table(rope_steps(7, 64), zipf(7)).abs()
    yield "! RoPE never mixes: r of a constant step", full(32, 1.0), "=", still

    keep = f64([[0.99, 0.01], [0.01, 0.99]])                # a Markov chain of two tokens, angles +-1.25
    sticky = torch.linalg.matrix_power(keep * exp_i([1.25, -1.25]), 40).sum().abs() / 2
    yield "! text is not iid: coherence of a sticky chain, above r^n", math.cos(1.25) ** 40, "<", sticky


def mixing_time(r, eps, weight=1.0):
    """n_mix: the smallest n with sum_b weight_b r_b^n <= eps; for one pair ln(1/eps) / ln(1/r), rounded up.

    r and weight (pairs,) or numbers -> a number: inf at r = 1 (RoPE), nan if r is. Logits are right to eps
    nats after n_mix(eps / lam) steps, not n_mix(eps).
    """
    def left(n):
        return float((f64(weight) * f64(r) ** n).sum())

    low, high = -1, 2 ** 40
    if not left(high) <= eps:
        return math.inf if left(1) > 0 else math.nan
    while high - low > 1:
        middle = (low + high) // 2
        if left(middle) <= eps:
            high = middle
        else:
            low = middle
    return high


@check(2)
def mixing_takes_logarithmic_time(g):
    r, weight = 0.99 * uniform(g, 8), uniform(g, 8)
    too_early = (weight * r ** count(5000)[:, None]).sum(1) > 0.01
    first = too_early.sum() + 1
    yield "n_mix: first n with sum_b weight_b r_b^n <= .01", mixing_time(r, 0.01, weight), "=", first


def reflection_moments(n, d, cos):
    """(E s, E s^2) after n reflections I - 2ww', w uniform, |q| = |k| = 1, q.k = cos; limits 0 and 1/d.

    E M = (1 - 2/d) I, the largest gap of reflections of any law, since the trace of E ww' is 1. Symmetric
    traceless matrices shrink by (d-2)/(d+2) a step.
    """
    first = (1 - 2 / d) ** n * cos
    shrink = (d - 2) / (d + 2)
    second = 1 / d + shrink ** n * (cos ** 2 - 1 / d)
    return first, second


@check(2)
def reflections_mix(g):
    x = reflected(g, eye(8)[0].expand(20000, 8), 6)
    s = 0.6 * x[:, 0] + 0.8 * x[:, 1]
    first, second = reflection_moments(6, 8, 0.6)
    yield "E s = (1 - 2/d)^n q.k, 6 reflections", first, "~", s
    yield "E s^2 = 1/d + ((d-2)/(d+2))^n ((q.k)^2 - 1/d)", second, "~", s ** 2

    laws = F.normalize(torch.cat((uniform(g, 50, 8), torch.ones(1, 8))), p=1)
    norms = (1 - 2 * laws).abs().amax(1)                    # w is one of 8 axes: E M = I - 2 diag(law)
    least = reflection_moments(1, 8, 1.0)[0]
    yield "||E M|| >= 1 - 2/d, any law of w; = if uniform", least, "=", norms.min()


def torus_gap(angles, p):
    """rho_2: |E s^2 - limit| <= rho_2^n |q|^2 |k|^2, for a table of angles (V, pairs), frequencies p (V,).

    It is the largest |chi| of the angles 2 a_b and a_b +- a_b', b != b'. The limit is that of independent
    uniform phases, sum_b |q_b|^2 |k_b|^2 / 2, not Haar's. r < 1 says nothing about squares: rho_2 may be 1.
    """
    plus = chi_table(angles[:, :, None] + angles[:, None], p).abs()
    minus = chi_table(angles[:, :, None] - angles[:, None], p).abs()
    return max(plus.max(), (minus - 2 * eye(len(minus))).max())


def second_moment(angles, p):
    """E[M x M] (d^2, d^2) of the rotations by a table's angles."""
    d = 2 * angles.size(1)
    axes = eye(d)[None, :, None].expand(1, d, len(p), d)
    turned = rotate(axes, angles[None, None])[0]            # (axis, token, d)
    return torch.einsum("t,atc,bte->abce", p, turned, turned).reshape(d * d, d * d)


@check(2)
def squares_need_a_gap_of_their_own(g):
    angles, p = normal(g, 6, 3), zipf(6)
    mixed = second_moment(circle(5)[texts(5, 3)], full(125, 1 / 125))
    norm = torch.linalg.matrix_norm(second_moment(angles, p) - mixed, 2)
    yield "rho_2 = ||E[M x M] - that of mixed phases||", torus_gap(angles, p), "=", norm

    flip = math.pi * f64([[0, 0], [1, 1]])
    yield "! E M = 0 is not enough: M = +-I has rho_2 = 1", torus_gap(flip, full(2, 0.5)), "=", 1
    shared = normal(g, 6, 1).expand(6, 2)
    yield "! nor r < 1 where pairs share one angle: rho_2 = 1", torus_gap(shared, p), "=", 1


# -----------------------------------------------------------------------------------------------------------
# 3. Concentration of s = q.Pk, |q| = |k| = 1

def haar_tail(t, d):
    """P(s >= t) for P Haar on O(d) or SO(d), d >= 2, 0 <= t <= 1, exact.

    It is c int_{asin t}^{pi/2} cos^(d-2), c = Gamma(d/2) / (sqrt(pi) Gamma((d-1)/2)), here by Gauss-Legendre.
    """
    x, weight = map(f64, np.polynomial.legendre.leggauss(60))
    low = math.asin(t)
    half = (math.pi / 2 - low) / 2
    log_c = math.lgamma(d / 2) - math.lgamma((d - 1) / 2) - math.log(math.pi) / 2
    angle = low + half * (x + 1)
    return math.exp(log_c) * half * (weight * angle.cos() ** (d - 2)).sum()


def haar_tail_bound(t, d):
    """P(s >= t) <= 1/2 min((1 - t^2)^((d-1)/2), e^(-d t^2/2)), from a cap and E e^(as) <= e^(a^2/2d)."""
    cap = (1 - t * t) ** ((d - 1) / 2)
    return 0.5 * min(cap, math.exp(-d * t * t / 2))


def levy_bound(t, d):
    """Levy's lemma (quoted): P(f >= E f + t) <= e^(-(d-1) t^2/2), f on the unit sphere, Lipschitz constant 1.

    It does not use that s is linear: valid, but far from sharp. On SO(d) the exponent would be (d-2) t^2/8.
    """
    return math.exp(-(d - 1) * t * t / 2)


@check(3)
def haar_steps_concentrate(g):
    t = np.linspace(0, 0.999, 20)
    yield "P(s >= t) = (1 - t)/2, d = 3 (Archimedes)", f64([haar_tail(x, 3) for x in t]), "=", (1 - t) / 2
    yield "P(s >= .3), d = 16", haar_tail(0.3, 16), "~", sphere(g, 20000, 16)[:, 0] >= 0.3

    cases = [(x, d) for x in t[1:] for d in (2, 3, 4, 5, 8)]
    tails = (haar_tail, haar_tail_bound, levy_bound)
    exact, bound, levy = (f64([tail(*case) for case in cases]) for tail in tails)
    yield "P(s >= t) <= 1/2 min((1-t^2)^((d-1)/2), e^(-dt^2/2)), d <= 8", bound, ">=", exact, 3.5
    yield "... nearly sharp: d = 2, t = .7", haar_tail_bound(0.7, 2), ">=", haar_tail(0.7, 2), 1.22
    yield "Levy's lemma: P(s >= t) <= e^(-(d-1)t^2/2)", levy, ">=", exact

    tail, bound, levy = (tail(0.5, 64) for tail in tails)
    yield "... d = 64, t = .5: 5.2 times too large", bound, ">=", tail, 5.3
    yield "! Levy's: 34 times too large", levy, ">=", tail, 35


def pairs_tail(t, r, proxy=1.0):
    """P(S >= mean + t) <= e^(-t^2/(2 proxy R)): S = sum_b r_b cos(phase_b), independent pairs, R = sum r_b^2.

    proxy 1: any law, any number of steps, mean = sum r_b |chi_b|^n (Hoeffding). proxy 1/2: uniform phases,
    mean 0, by I_0(x) <= e^(x^2/4). Energy must be spread over the pairs: d is replaced by 2 (sum r_b)^2 / R.
    """
    return torch.exp(-t * t / (2 * proxy * (r ** 2).sum()))


def pairs_tail_finite(t, r, chi, n):
    """Proxy 1/2 after n steps takes harmonics chi_b(m) = |E exp(i m angle)|, m = 1, 2, ..., (orders, pairs):

        P(S >= sum r_b chi_b(1)^n + t) <= exp(-t^2/R + 2 sum_b sum_{m>=2} chi_b(m)^n (t r_b/R)^m / m!),

    by I_m(x)/I_0(x) <= (x/2)^m / m!.
    """
    R = (r ** 2).sum()
    order = count(len(chi))[1:, None]
    factorial = torch.exp(torch.lgamma(order + 1))
    harmonics = chi[1:] ** n * (t * r / R) ** order / factorial
    return torch.exp(-t * t / R + 2 * harmonics.sum())


def cramer_rate(t, chi):
    """-log P(S >= t pairs) / pairs for many pairs with r_b = 1 (Cramer): max_a (a t - log E e^(a cos))."""
    x, a = circle(256), 0.002 * count(1000)
    waves = (count(len(chi))[:, None] * x).cos()
    density = (1 + 2 * chi @ waves) / 256
    mgf = torch.exp(a[:, None] * x.cos()) @ density
    return (a * t - mgf.log()).max()


@check(3)
def independent_pairs_concentrate(g):
    one, even = full(1, 1.0), count(60) % 2 == 0            # rows compare exponents, -log P / pairs
    rate = cramer_rate(0.2, even * 0.995 ** count(60) ** 2)      # angles 0 and pi, a little blurred
    hoeffding, mixed = -pairs_tail(0.2, one).log(), -pairs_tail(0.2, one, 0.5).log()
    yield "P(S >= mean + t) <= e^(-t^2/2R), any law: exponent", hoeffding, "<=", rate, 1.02
    yield "! not e^(-t^2/R): angles 0 and pi have harmonics", rate, "<", mixed

    rate = cramer_rate(0.2, full(1, 0.0))
    yield "P(S >= t) <= e^(-t^2/R), uniform phases: exponent", mixed, "<=", rate, 1.02

    chi = even * 0.8 ** count(60)
    bound = -pairs_tail_finite(0.2, one, chi[:, None], 3).log()
    yield "... with harmonics, after 3 steps: exponent", bound, "<=", cramer_rate(0.2, chi ** 3), 1.1

    alone = math.acos(0.8) / math.pi
    yield "! energy in one pair, or one angle for all: P(s >= .8)", haar_tail_bound(0.8, 64), "<", alone


# -----------------------------------------------------------------------------------------------------------
# 4. Score gap. Far tokens lie on one path, so they may depend on each other in any way

def route_bound(steps):
    """Near routes: |q.Pk - q.k| <= sum_t ||M_t - I|| |q||k|, for the steps (n, d, d) in between.

    Few steps, close to I, keep high scores high. Reflections are never close to I, but E s = (1 - 2/d)^n q.k.
    """
    return torch.linalg.matrix_norm(steps - eye(steps.size(-1)), 2).sum()


@check(4)
def near_scores_stay_high(g):
    turn = torch.linalg.matrix_exp(f64([[0, -0.02], [0.02, 0]]))
    bound = route_bound(turn.expand(8, 2, 2))               # q and k at a right angle: s = sin(8 * .02)
    yield "|q.Pk - q.k| <= sum ||M_t - I|| |q||k|, 8 small turns", bound, ">=", math.sin(0.16), 1.01
    yield "! a reflection is not near I", route_bound(mirror(sphere(g, 1, 8))), "=", 2
    s = reflected(g, eye(64)[0].expand(2000, 64), 4)[:, 0]
    yield "but E s = (1 - 2/d)^n q.k: 4 of them, d = 64", reflection_moments(4, 64, 1.0)[0], "~", s


def far_weight_bound(gap):
    """A far token's weight is at most this times a near one's if near logits exceed far ones by the gap."""
    return math.exp(-gap)


def far_threshold_haar(far, delta, d):
    """All `far` logits are <= lam times this with probability 1 - delta: union bound over haar_tail_bound."""
    from_exponent = 2 * math.log(far / (2 * delta)) / d
    from_cap = 1 - (2 * delta / far) ** (2 / (d - 1))
    return math.sqrt(min(from_exponent, from_cap))


def far_threshold_pairs(far, delta, lam_pairs, proxy=1.0, mean=0.0):
    """All `far` logits are <= this with probability 1 - delta: union bound over pairs_tail.

    It grows with the log of their number: no gap has high probability at every length. What does not depend
    on the length is an expectation, far_partition.
    """
    variance = proxy * (lam_pairs ** 2).sum()
    return mean + math.sqrt(2 * variance * math.log(far / delta))


@check(4)
def far_scores_stay_low(g):
    logits = normal(g, 12)
    gap = float(logits[:4].min() - logits[4:].max())
    weights = logits.softmax(0)
    ratio = weights[4:].max() / weights[:4].min()
    yield "far weight <= e^-gap near weight", far_weight_bound(gap), "=", ratio

    cases = [(1, 0.4, 3), (65536, 0.1, 64)]                 # either form of the bound
    union = [far * haar_tail_bound(far_threshold_haar(far, delta, d), d) for far, delta, d in cases]
    yield "P(a far logit > threshold) <= delta, haar_tail_bound", f64(cases)[:, 1], "=", union
    above = 1 - (1 - haar_tail(far_threshold_haar(100, 0.05, 8), 8)) ** 4096        # independent tokens
    yield "! threshold of 100 tokens at 4,096: no gap for all lengths", 0.05, "<", above

    lam_pairs = uniform(g, 8)
    threshold = far_threshold_pairs(4096, 0.05, lam_pairs, 0.7, 0.3)
    union = 4096 * pairs_tail(threshold - 0.3, lam_pairs, 0.7)
    yield "P(a far logit > threshold) <= delta, pairs_tail", 0.05, "=", union


def far_partition(lam_pairs):
    """Phi = E e^logit of a far token = prod_b I_0(lam_b) <= e^(sum lam_b^2 / 4) at any length, phases mixed.

    It pins the far mass between E rho <= far Phi / (far Phi + Z_near), Z_near the sum of e^logit over near
    tokens, and rho >= far e^mean / (far e^mean + Z_near) (Jensen), where the mean far logit is about 0.
    """
    return torch.special.i0(lam_pairs).prod(-1)


@check(4)
def far_mass_is_pinned(g):
    lam_pairs = f64([0.3, 1.0, 3.0])
    mean = (lam_pairs[:, None] * circle(64).cos()).exp().mean(1).prod()
    yield "E e^logit = Phi = prod_b I_0(lam_b) (quadrature)", far_partition(lam_pairs), "=", mean

    lam_pairs, far, Z_near = full(32, 0.25), 2048, 4 * math.exp(6)      # d = 64, lam = 8
    Phi = far_partition(lam_pairs)
    yield "Phi <= e^(sum lam_b^2 / 4)", math.exp(0.5), ">=", Phi, 1.01
    logits = (lam_pairs * walk(g, 30, far, 32).cos()).sum(-1)
    rho = far_mass(logits.exp().sum(-1), Z_near)
    yield "E rho <= far Phi / (far Phi + Z_near)", far_mass(far * Phi, Z_near), ">=", rho, 1.05
    bound = far_mass(far * logits.mean(-1).exp(), Z_near)
    yield "rho >= far e^mean / (far e^mean + Z_near)", bound, "<=", rho, 1.4


# -----------------------------------------------------------------------------------------------------------
# 5. Far mass

def far_mass(far, near, gap=0.0):
    """rho = far / (far + near e^gap), for numbers of tokens or sums of e^logit. It is an identity for the gap

        Delta_eff = logmeanexp(near logits) - logmeanexp(far logits),

    so a lower bound for 2 lam (equality: near +lam, far -lam) or, sharper, for max near - mean far (Jensen).
    The theory says that Delta_eff does not depend on the length: then one length predicts all.
    """
    return torch.sigmoid(torch.log(f64(far) / f64(near)) - f64(gap))


def near_coefficient(far, near, gap):
    """1 - rho, which multiplies the near tokens' output: about near e^gap / far, it goes to 0 for any gap.

    For 2 lam it is an upper bound, whatever the rotations; carrying values does not change it.
    """
    return far_mass(near, far, -f64(gap))


def forced_length(mass, near, lam):
    """Length from which rho >= mass whatever the rotations. At lam = 8 it is far beyond any context."""
    far = mass / (1 - mass) * near * math.exp(2 * lam)
    return near + math.ceil(far)


@check(5)
def attention_drifts_to_far_tokens(g):
    logits = 4 * uniform(g, 500, 1) * (2 * uniform(g, 500, 58) - 1)
    near, far = logits[:, :8], logits[:, 8:]
    rho = logits.softmax(-1)[:, 8:].sum(-1)
    effective = near.exp().mean(-1).log() - far.exp().mean(-1).log()
    yield "rho = far / (far + near e^Delta_eff)", far_mass(50, 8, effective), "=", rho
    yield "rho >= that with max near - mean far", far_mass(50, 8, near.amax(-1) - far.mean(-1)), "<=", rho

    weights = torch.cat((full(64, 8.0), full(65472, -8.0))).softmax(0)
    yield "rho >= that with 2 lam; = for near +8, far -8", far_mass(65472, 64, 16), "=", weights[64:].sum()
    yield "1 - rho <= the near coefficient of 2 lam", near_coefficient(65472, 64, 16), "=", weights[:64].sum()
    left = near_coefficient(1e9, 64, 4)
    yield "! it goes to 0, as near e^gap/far: far = 1e9, gap 4", 64e-9 * math.exp(4), ">=", left, 1.001

    far = forced_length(0.9, 64, 2) - 64
    forced = far_mass(f64([far, far - 1]), 64, 4) - 0.9
    yield "rho >= .9 is forced from here on, not one token before", forced.sign(), "=", [1, -1]
    yield "! lam = 8 forces 1/2 only far beyond 65,536", 65536, "<", forced_length(0.5, 64, 8)


# -----------------------------------------------------------------------------------------------------------
# 6. Distance bias: logits s + bias(n), |s| <= lam; near tokens have n < near, far ones near <= n < length

def alibi_far_bound(near, slope, lam, length=math.inf):
    """ALiBi: rho <= R / (1 + R), R = e^(2 lam) (e^(-slope near) - e^(-slope length)) / (1 - e^(-slope near)).

    Tight; the same for forget gates with log f_t <= -slope at every token (Forgetting Transformer). rho <= f
    at every length for near = ln(1 + e^(2 lam) (1 - f)/f) / slope.
    """
    far = math.exp(-slope * near) - math.exp(-slope * length)
    R = math.exp(2 * lam) * far / -math.expm1(-slope * near)
    return R / (1 + R)


def bias_far_bound(bias, near, lam):
    """Any bias (length,): rho <= R / (1 + R), R = e^(2 lam) sum_far e^bias / sum_near e^bias; tight.

    It stays below 1 at every length iff sum e^bias converges: not for -ln n, nor where it saturates (T5).
    """
    log_far, log_near = bias[near:].logsumexp(0), bias[:near].logsumexp(0)
    return torch.sigmoid(2 * lam + log_far - log_near)


@check(6)
def a_distance_bias_holds_attention(g):
    n, bias = count(300) - 1, normal(g, 300)
    worst = torch.where(n < 20, full(300, -2.0), full(300, 2.0))
    rho = (worst + bias).softmax(0)[20:].sum()
    yield "any bias: rho <= R/(1+R); = for far +lam, near -lam", bias_far_bound(bias, 20, 2.0), "=", rho

    alibi = alibi_far_bound(20, 0.05, 2.0, 300)
    yield "ALiBi: the same in closed form", alibi, "=", bias_far_bound(-0.05 * n, 20, 2.0)
    forget = (1 - 0.001 * uniform(g, 300)).log().cumsum(0) - 0.05 * n
    yield "forget gates f <= e^-slope: no more than that", alibi, ">=", bias_far_bound(forget, 20, 2.0), 1.1
    near = math.log1p(math.exp(8) * 99) * 256
    yield "rho <= .01 for near = ln(1 + 99 e^(2 lam))/slope", alibi_far_bound(near, 1 / 256, 4), "=", 0.01

    n = count(10 ** 6)
    harmonic = (1 / n).cumsum(0)
    left = 1 - bias_far_bound(-n.log(), 64, 0)
    yield "! bias -ln(1+n): near mass H_64/H_n goes to 0", left, "=", harmonic[63] / harmonic[-1]
    limit = 1 - (n[:64] ** -2).sum() * 6 / math.pi ** 2
    rho = bias_far_bound(-2 * n.log(), 64, 0)
    yield "bias -2 ln(1+n): rho beyond 64 stays below this", limit, ">=", rho, 1.001


# -----------------------------------------------------------------------------------------------------------
# 7. Values: far output O = sum_j alpha_j P_{j->i} v_j, v_j = c + noise_j; the background c they share adds up

def value_gain(r):
    """kappa = (1+r)/(1-r): E |sum alpha_j P_j c|^2 <= kappa |c|^2 sum alpha^2, alpha independent of steps.

    Steps need not commute: P_k' P_j = P_{j->k} for any orthogonal ones (reflections: kappa = d - 1).
    """
    return (1 + f64(r)) / (1 - f64(r))


def value_moment(alpha, chi):
    """E |sum alpha_j P_j c|^2 / |c|^2 = sum_jk alpha_j alpha_k Re chi^|j-k|; reflections: chi = 1 - 2/d."""
    n = torch.arange(len(alpha))
    correlation = torch.as_tensor(chi, dtype=torch.complex128) ** (n[:, None] - n).abs()
    return alpha @ correlation.real @ alpha


def background_bound(alpha, r, covariance):
    """Values over a shared Gaussian background c ~ N(0, covariance): sum_j alpha_j P_j c has a covariance of
    operator norm <= kappa sum alpha^2 ||covariance||."""
    return value_gain(r) * (alpha ** 2).sum() * torch.linalg.matrix_norm(covariance, 2)


@check(7)
def carried_values_decohere(g):
    angles, p, text = normal(g, 3), zipf(3), texts(3, 4)
    phase = F.pad(angles[text].cumsum(1), (1, 0))           # of 5 tokens, 4 steps
    alpha = normal(g, 5).softmax(0)
    square = (alpha * exp_i(phase)).sum(1).abs() ** 2
    moment = value_moment(alpha, chi_table(angles, p))
    yield "E |sum alpha P c|^2, all texts of 5 tokens", moment, "=", p[text].prod(1) @ square

    mirrors = mirror(torch.cat((eye(3), torch.linalg.qr(normal(g, 3, 3)).Q)))       # E M = (1 - 2/3) I
    alpha, carried = full(5, 0.2), 0.2 * eye(3)
    for token in texts(6, 4).T:
        carried = mirrors[token] @ carried + 0.2 * eye(3)
    square = (carried[:, :, 0] ** 2).sum(-1).mean()
    yield "! steps need not commute: reflections, chi = 1 - 2/d", value_moment(alpha, 1 / 3), "=", square
    shared = torch.diag(f64([1.0, 1.0, 0.8]))
    norm = torch.linalg.matrix_norm((carried @ shared @ carried.mT).mean(0), 2)
    bound = background_bound(alpha, 1 / 3, shared)
    yield "background N(0, S): ||cov|| <= kappa sum alpha^2 ||S||", bound, ">=", norm, 1.35

    n = count(400)
    correlation = 0.8 ** (n[:, None] - n).abs()
    largest = torch.linalg.eigvalsh(correlation)[-1]
    yield "E |sum alpha P c|^2 <= kappa sum alpha^2, worst alpha", value_gain(0.8), ">=", largest, 1.01

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
    lam_pairs, x = f64([0.3, 1.0, 3.0]), circle(64).cos()
    weight = (lam_pairs[:, None] * x).exp()
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
    n_eff, gain = 1 / (alpha ** 2).sum(1), value_gain(math.exp(-1 / 8))
    formula = far_output(full(8, 1.0), value_floor(lam_pairs), gain, n_eff).mean()
    yield "the keys' angles: |c|^2 (floor^2 + kappa/n_eff), or less", formula, ">=", square, 1.35
    formula = far_output(full(8, 1.0), 0.0, gain, n_eff).mean()
    yield "! kappa/n_eff alone is no bound", formula, "<", square


# -----------------------------------------------------------------------------------------------------------
# 8. Rotation and distance bias together: section 6 as it stands (|s| <= lam either way), section 4 improved

def biased_partition(Phi, slope, near, length):
    """E Z_far = Phi (e^(-slope near) - e^(-slope length)) / (1 - e^-slope), finite at any length.

    E rho <= E Z_far / (E Z_far + Z_near) as before, with no log of the length.
    """
    far = math.exp(-slope * near) - math.exp(-slope * length)
    return Phi * far / -math.expm1(-slope)


@check(8)
def rotation_with_a_bias(g):
    lam_pairs, distance = full(32, 0.25), count(1024)[64:] - 1
    Phi = far_partition(lam_pairs)
    Z_far = biased_partition(Phi, 0.02, 64, 1024)
    total = (Phi * (-0.02 * distance).exp()).sum()
    yield "E Z_far = Phi sum e^(-slope n), near <= n < length", Z_far, "=", total

    logits = (lam_pairs * walk(g, 50, 960, 32).cos()).sum(-1) - 0.02 * distance
    rho = far_mass(logits.exp().sum(-1), 40)
    yield "E rho <= E Z_far/(E Z_far + Z_near)", far_mass(Z_far, 40), ">=", rho, 1.25


# -----------------------------------------------------------------------------------------------------------
# A trained model, measured at the same query tokens for every length

QUERIES = 32      # measured per head and stretch of text
TOLERANCE = 0.1   # nats: phases have mixed when the mean logit is this close to its limit
STEPS = {"layer": "", "r": ".3f", "lam": ".2f", "n_mix": ",", "unmixed": ".2f"}
COHERENCE = {"n": ",", "text": ".3f", "r^n": ".3f"}
LOGITS = {"from": ",.0f", "below": ",.0f", "mean": ".2f", "std": ".2f", "max": ".2f", "logmeanexp": ".2f"}
FAR = {"far_mass": ".4f", "predicted": ".4f", "mean_far": ".4f", "worst_case": ".1e", "gap": ".2f",
       "coherence": ".3f", "expected": ".3f", "floor": ".3f", "n_eff^-.5": ".3f"}


class Layer(NamedTuple):
    """What `attend` takes: q, k, v (1, H, T, d), two transports or None, key bias (1, H, T) or None."""
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    transport: object
    value_transport: object
    key_bias: torch.Tensor


def layer_inputs(model, idx):
    """Walk the layers on token ids (1, T), and yield the Layer of each."""
    x = model.wte(idx)
    shared = model.transport(idx, x)
    for block in model.h:
        yield Layer(*block.attn.inputs(block.ln_1(x), idx, shared))
        x = block(x, idx, shared)


def phases_of(layer):
    """Phases (H|1, T, pairs) that a layer attends with; not a number where its steps are not rotations."""
    if isinstance(layer.transport, Rotation):
        return layer.transport.phase[0].double()
    still = pairs_of(layer.q[0, :1]).double() * 0
    return still if layer.transport is None else still * math.nan


def pairs_of(x):
    """Lengths of channel pairs: (..., d) -> (..., d/2)."""
    return x.unflatten(-1, (2, -1)).norm(dim=-2)


def coherence(phase, n):
    """|E exp(i (phase_t - phase_{t-n}))| over a text, (H|1, T, pairs) -> (H|1, pairs); r for n = 1.

    The mean over places weights a table by token frequency. What N random numbers leave is taken off.
    """
    turned = phase[:, n:] - phase[:, :-n]
    square = exp_i(turned).mean(1).abs() ** 2
    return (square - (1 - square) / turned.size(1)).clamp(0, 1).sqrt()


def path_products(q, k, path, rows):
    """q_i . H_i ... H_{j+1} k_j of PaTH, for the queries in rows (Q,) and all keys j <= i: (1, H, Q, T).

    q, k (1, H, T, d). The queries are carried back, chunk by chunk of steps.
    """
    W, X = ut_transform(path.w, path.beta)
    keys, q, products = in_chunks(k), q[:, :, rows], []
    places = in_chunks(torch.arange(k.size(2), device=rows.device)[None, None])[0, 0]
    for n in reversed(range(len(places))):
        w, key = W[:, :, n], keys[:, :, n]
        on_the_way = places[n] <= rows[:, None]             # steps up to the query's own, (Q, c)
        turned = (q @ w.mT * on_the_way) @ X[:, :, n]
        products.append(q @ key.mT - turned @ (w @ key.mT).tril(-1))
        q = q - turned @ w
    return torch.cat(products[::-1], dim=-1)[..., :k.size(2)]


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


def far_statistics(layer, rows, near):
    """Attention of the queries in rows (Q,), ascending and >= near, to far keys: `near` or more tokens away.

    Logits are Q x T a head, half the size of its keys; nothing is T x T. -> dict of tensors (H, Q), and
    "logits" (buckets, 6), "energy" (H, pairs): lam by pair.
    """
    queries, keys, values = layer.q[0][:, rows], layer.k[0], layer.v[0]
    root = math.sqrt(queries.size(-1))
    logits = query_logits(layer, rows)
    distance = rows[:, None] - torch.arange(len(keys[0]), device=rows.device)
    far = (rows + 1 - near).double()                        # how many
    near_logits = logits.masked_fill((distance < 0) | (distance >= near), -math.inf)
    far_logits = logits.masked_fill(distance < near, -math.inf)
    near_lme = near_logits.logsumexp(-1) - math.log(near)
    far_lme = far_logits.logsumexp(-1) - far.log()
    gap = near_lme - far_lme
    far_mean = (logits * (distance >= near)).sum(-1) / far

    longest = keys.norm(dim=-1).amax(-1)[:, None]
    spread = 2 * queries.norm(dim=-1) * longest / root
    if layer.key_bias is not None:                          # it may rise
        spread = spread + layer.key_bias[0][:, rows] - layer.key_bias[0][:, :1]

    alpha = far_logits.softmax(-1).to(values.dtype)         # far output over rho
    carried = values if layer.value_transport is None else layer.value_transport.encode(layer.v)[0]
    size = (alpha @ values.norm(dim=-1, keepdim=True))[..., 0]
    n_eff = 1 / alpha.square().sum(-1)
    expected, floor = expected_output(layer, carried, rows, near, n_eff)
    return {
        "far": far.expand_as(gap),
        "gap": gap,
        "far_mass": far_mass(far, near, gap),
        "mean_far": far_mass(far, near, near_logits.amax(-1) - far_mean),
        "worst_case": far_mass(far, near, spread),
        "coherence": (alpha @ carried).norm(dim=-1) / size,
        "expected": expected / size,
        "floor": floor / size,
        "n_eff^-.5": n_eff.rsqrt(),
        "logits": logits_by_distance(logits, distance, near),
        "energy": pairs_of(queries).mean(1) * pairs_of(keys).mean(1) / root,
    }


def expected_output(layer, carried, rows, near, n_eff):
    """far_output, and what of it n_eff (H, Q) does not lower, from what keys far from all queries share.

    Values that stay, and those that reflections carry, are taken as they are in the frame of attention.
    """
    old = slice(0, int(rows[0]) - near + 1)
    queries, key = layer.q[0][:, rows], layer.k[0, :, old].mean(1)
    lam_pairs = pairs_of(queries) * pairs_of(key)[:, None] / math.sqrt(queries.size(-1))
    coherent, gain, values = torch.ones_like(lam_pairs), 0.0, carried[:, old]
    if isinstance(layer.value_transport, Rotation):
        own_angles = layer.value_transport is not layer.transport
        coherent = torch.zeros_like(lam_pairs) if own_angles else value_floor(lam_pairs)
        gain = value_gain(coherence(layer.value_transport.phase[0].double(), 1))[:, None]
        values = layer.v[0, :, old]
    c2 = pairs_of(values.mean(1))[:, None] ** 2
    noise = values.var(1, correction=0).sum(-1, keepdim=True)
    expected = far_output(c2, coherent, gain, n_eff, noise)
    return expected.sqrt(), far_output(c2, coherent, 0.0, n_eff).sqrt()


def logits_by_distance(logits, distance, near):
    """Logits (H, Q, T) at distances (Q, T), in buckets of doubling distance: (buckets, 6), columns LOGITS."""
    doubling = [2 ** i for i in range(int(distance.max()).bit_length() + 1)]
    edges = sorted({0, near, *doubling})
    buckets = []
    for low, high in zip(edges, edges[1:]):
        x = logits[:, (distance >= low) & (distance < high)]                # (H, logits in the bucket)
        logmeanexp = (x.logsumexp(-1) - math.log(x.size(-1))).mean()
        buckets.append(f64([low, high, x.mean(), x.std(correction=0), x.max(), logmeanexp]))
    return torch.stack(buckets)


@torch.no_grad()
def measure(run, args):
    """Measure a run, write run/theory.json, print its tables; -> the JSON's dict.

    Means are over text, heads and, in "far" and "logits", layers; "heads" has them apart.
    """
    device = torch.device(pick_device(args.device))
    model, saved = load_model(run / "ckpt.pt", device)
    context, folder = saved["train_config"]["block_size"], data.find(saved["train_config"]["data"])
    if not 16 <= context <= args.length or args.stretches < 1:
        raise ValueError(f"{run}: needs a training context ({context}) of 16 or more, --length {args.length} "
                         f"no shorter, --stretches {args.stretches} 1 or more")
    data.check_encoding(folder, saved["encoding"], saved["vocab_size"])
    val = data.load(folder, "val", args.length, model.config.vocab_size)

    ends = np.unique(np.linspace(args.length, len(val), args.stretches).astype(np.int64))
    stretches = np.stack([val[end - args.length:end] for end in ends])
    stretches = torch.from_numpy(stretches.astype(np.int64)).to(device)
    lengths, near = [context], context // 4
    while lengths[-1] < args.length:
        lengths.append(min(2 * lengths[-1], args.length))

    progress = Progress(model, run.name, [(length, length) for length in lengths for _ in ends])
    far, logits = [], []
    for length in lengths:
        rows = torch.linspace(length - context // 2, length - 1, QUERIES, device=device).long()
        found = []
        for text in stretches:
            for layer in layer_inputs(model, text[None, -length:]):
                found.append(far_statistics(layer, rows, near))
            progress.tick(length, length)

        s = {}                                              # stretches, layers, ...
        for key in found[0]:
            stacked = torch.stack([layer[key] for layer in found]).double().cpu()
            s[key] = stacked.unflatten(0, (len(stretches), -1))
        if length == context:
            gap = s["gap"]
        s["predicted"] = far_mass(s["far"], near, gap)
        row = {"context": length} | {key: float(s[key].mean()) for key in FAR}
        far.append(row | {"heads": s["far_mass"].mean((0, -1)).tolist()})
        for bucket in s["logits"].mean((0, 1)).tolist():
            logits.append({"context": length} | dict(zip(LOGITS, bucket)))

    steps, decoherence = step_tables(layer_inputs(model, stretches[:1]), s["energy"].mean(0), context)
    result = {"run": run.name, "pos": model.config.pos, "iter_num": saved["iter_num"],
              "train_context": context, "near": near, "data": folder.name,
              "stretches": len(stretches), "queries": QUERIES,
              "steps": steps, "decoherence": decoherence, "logits": logits, "far": far}
    data.write_json(run / "theory.json", finite(result))
    print_tables(result)
    return result


def step_tables(layers, energy, context):
    """Rows of STEPS and of COHERENCE, from the Layers on a text and their energy (layers, H, pairs)."""
    steps, curves = [], []
    for layer, e in zip(layers, energy):
        phase, weight = phases_of(layer), e / e.sum()
        lam = e.sum(-1, keepdim=True)
        lags = [2 ** i for i in range((phase.size(1) // 4).bit_length() - 1)]
        r = coherence(phase, 1).cpu().expand_as(e)
        for n in lags:
            text = coherence(phase, n).cpu()
            curves += [float((weight * text).sum()), float((weight * r ** n).sum())]

        n_mix = [mixing_time(r_head, TOLERANCE, e_head) for r_head, e_head in zip(r, e)]
        unmixed = torch.where(r.isnan(), math.nan, 1.0 * (lam * r ** context > TOLERANCE))
        steps.append({
            "layer": len(steps),
            "r": float((weight * r).sum()),
            "lam": float(lam.mean()),
            "n_mix": max(n_mix),
            "unmixed": float((weight * unmixed).sum()),
            "heads": {"n_mix": n_mix, "r": r.tolist(), "energy": e.tolist()},
        })
    text, expected = np.reshape(curves, (len(steps), len(lags), 2)).mean(0).T.tolist()
    return steps, [dict(zip(COHERENCE, row)) for row in zip(lags, text, expected)]


def show(title, rows, columns):
    """Print a table: a line per dict of rows, a column per key with its format."""
    print(f"\n{title}\n" + " ".join(f"{key:>10}" for key in columns))
    for row in rows:
        print(" ".join(f"{row[key]:>10{spec}}" for key, spec in columns.items()))


def print_tables(result):
    context, longest = result["train_context"], result["far"][-1]["context"]
    print(f"\n{result['run']}: {result['pos']}, iter {result['iter_num']:,}, trained at {context}; far: from "
          f"{result['near']} tokens; {result['data']}: {result['stretches']} x {result['queries']} queries")
    show(f"steps (r by energy; n_mix of the slowest head, to {TOLERANCE} nats; energy unmixed at {context})",
         result["steps"], STEPS)
    show("coherence of phases n steps apart", result["decoherence"], COHERENCE)
    shown = [row for row in result["logits"] if row["context"] in (context, longest)]
    show("logits by distance", shown, {"context": ","} | LOGITS)
    show(f"far mass (predicted: gap of {context}; bounds mean_far, worst_case), coherence of the far output",
         result["far"], {"context": ","} | FAR)


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
            ends.append((result["far"][-1][measured], f"C{i}", result["pos"]))

        height = 1.06                       # labels as high as line ends, or as those above need
        for end, color, label in sorted(ends, reverse=True):
            height = min(end, height - 0.06)
            ax.annotate(label, (1.02, height), xycoords=ax.get_yaxis_transform(), color=color, va="center")
        ax.set(ylabel=title, ylim=(0, 1))
        ax.grid(alpha=0.3)
    axes[-1].set(xlabel="context length (tokens)")
    axes[-1].xaxis.set_major_formatter("{x:,.0f}")
    fig.tight_layout()
    return fig


def print_statements(seed):
    """Print the table of all statements; -> whether all hold."""
    rows = list(table(seed))
    shown = [row | {"holds": "yes" if row["holds"] else "NO"} for row in rows]
    show(f"seed {seed}; !: what a summary leaves out", shown, TABLE)
    print(f"{sum(row['holds'] for row in rows)} of {len(rows)} hold")
    return all(row["holds"] for row in rows)


def main(argv=None):
    parser = data.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("runs", nargs="*", metavar="RUN", help="folders with a ckpt.pt (default: check the statements)")
    option("--seed", type=int, default=0, help="of the checks' random numbers")
    option("--length", type=int, default=65536, help="longest context to measure (default 65,536)")
    option("--stretches", type=int, default=4, help="stretches of validation text to measure (default 4)")
    option("--device", default="auto", help="cpu, cuda, cuda:1, ...")
    option("--plot", action="store_true", help="draw out/theory.png (needs matplotlib)")
    args = parser.parse_args(argv)
    if not args.runs:
        raise SystemExit(not print_statements(args.seed))

    try:
        if args.plot:
            pyplot()                                        # before the work, not after it
        runs = [Path(run) for run in args.runs]
        check_runs(runs)
        results = [measure(run, args) for run in runs]
        if args.plot:
            Path("out").mkdir(exist_ok=True)
            plot(results).savefig("out/theory.png")
            print("\nout/theory.png")
    except (ValueError, OSError) as e:
        data.die(e)


if __name__ == "__main__":
    main()
