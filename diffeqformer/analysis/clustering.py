"""Do tokens cluster as they move? The paper's simulation (sections 5.1 and C.8), and the same measure of a trained model.

Attention alone, of one head, moves particles in space:

    dx_i/dt = sum_j softmax_j(<Q(t) x_i, K(t) x_j>) V(t) x_j,   Q(t) = s(t) Q, and so K and V

with random Q, K and V and a polynomial s. Of the paper's choice the degrees, 0 to 4, the number of particles and steps are known to us;
coefficients, horizon and start are ours: s(t) = (t / horizon)^degree, which ends at the same size for every degree and has done less by then the higher it is. As
controls, V, and the scores, which grow with s^2, can be multiplied by what makes their integral over time that of degree 0.
"""

from collections.abc import Collection

import numpy as np
from jaxtyping import Float

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
HORIZON = 10.0  # of the simulation's time


def simulate(
    degree: int,
    *,
    equal_total: Collection[str] = (),
    seed: int = 0,
    draws: int = 1,
    particles: int = 40,
    dimensions: int = 3,
    steps: int = 200,
    horizon: float = HORIZON,
) -> Float[np.ndarray, "draws states particles dimensions"]:
    """The positions of particles at time 0 and after every step of Euler's method, in float64, from a uniform start in [-1, 1].

    Args:
        degree: of the polynomial with which the weights grow; 0 keeps them constant.
        equal_total: "V" or "scores" or both, whose integral over time is the same for every degree, and not their last size.
        seed, draws: of starts and weights, which don't depend on the degree.
    """
    random = np.random.RandomState(seed)
    x = random.uniform(-1, 1, (draws, particles, dimensions))
    query, key, value = random.randn(3, draws, dimensions, dimensions) / dimensions**0.5
    states = [x]
    for step in range(1, steps + 1):
        size = (step / steps) ** degree
        sharpness = size**2 * (2 * degree + 1 if "scores" in equal_total else 1)
        strength = size * (degree + 1 if "V" in equal_total else 1)
        scores = sharpness * (x @ query) @ (x @ key).swapaxes(-1, -2)
        share = np.exp(scores - scores.max(-1, keepdims=True))
        x = x + horizon / steps * strength * (share / share.sum(-1, keepdims=True)) @ x @ value
        states.append(x)
    return np.stack(states, axis=1)


def relative_distances(
    states: Float[np.ndarray, "states N D"],
) -> tuple[Float[np.ndarray, "states quantiles"], Float[np.ndarray, "states"]]:
    """At each time, the `QUANTILES` of all pairwise distances as shares of their root mean square, and that itself.

    A swarm that only spreads or shrinks keeps its quantiles; where most particles are in a few clusters, the lower ones
    fall to 0. They are 0 where all particles are in one place.
    """
    above = np.triu_indices(states.shape[1], 1)
    quantiles, sizes = [], []
    for x in states.astype(np.float64):
        x = x - x.mean(0)
        squares = (x**2).sum(-1)
        distances = np.sqrt(np.maximum(squares[:, None] + squares - 2 * x @ x.T, 0)[above])
        sizes.append(np.sqrt((distances**2).mean()))
        quantiles.append(np.quantile(distances, QUANTILES) / (sizes[-1] or 1))
    return np.stack(quantiles), np.array(sizes)


def directions(states: Float[np.ndarray, "states N D"]) -> Float[np.ndarray, "states N D"]:
    """The states at length 1: a block's norms see little else, and one token far from all others doesn't hide what these do."""
    lengths = np.linalg.norm(states, axis=-1, keepdims=True)
    return states / np.where(lengths > 0, lengths, 1)
