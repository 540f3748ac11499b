"""The numbers of steps of depth among which training draws, and the layers that fewer steps leave out."""

import math

import numpy as np

MOST_STEPS = 2**16
"""The largest number of steps of depth. Memory ends sooner."""


def shares_of_depths(text: str) -> dict[int, float]:
    """The numbers of steps among which training draws, and their shares, which add up to 1, from `training_depths`.

    Args:
        text: such as "2,4,8", or "2:1,4:3,8:1" with weights (1 if left out). A ValueError if it isn't such a list, a
            number occurs twice, or one isn't positive or is above `MOST_STEPS`.
    """
    pairs = [item.partition(":") for item in text.split(",")] if text else []
    weights = {int(steps): float(weight) if colon else 1.0 for steps, colon, weight in pairs}
    if len(weights) < len(pairs) or not all(
        0 < steps <= MOST_STEPS and 0 < weight < math.inf for steps, weight in weights.items()
    ):
        raise ValueError(text)
    return {steps: weights[steps] / sum(weights.values()) for steps in sorted(weights)}


def left_out_layers(text: str) -> tuple[int, ...]:
    """The layers that fewer steps leave out, in this order, from `left_out`, such as "16,17,14".

    A ValueError if it isn't such a list, or a layer occurs twice.
    """
    layers = tuple(int(layer) for layer in text.split(",")) if text else ()
    if len({*layers}) < len(layers) or min(layers, default=0) < 0:
        raise ValueError(text)
    return layers


def trained_depths(config) -> dict[int, float]:
    """The numbers of steps of depth in training and their shares, from the `model` part of a config."""
    return shares_of_depths(config.training_depths) or {config.num_steps: 1.0}


def longest_grid(config, num_steps: int) -> int:
    """The steps that training takes at a number of steps, from the `model` part of a config: shifted grids add one."""
    return num_steps + (config.training_times == "shifted")


def chunk_length(steps: int, most: int) -> int:
    """The largest divisor of a number of steps that isn't above `most`; 0: all of them."""
    return next(length for length in range(min(most or steps, steps), 0, -1) if steps % length == 0)


def chunk_lengths(config) -> dict[int, int]:
    """The steps of a chunk at each number of steps in training, from the `model` part of a config."""
    return {depth: chunk_length(longest_grid(config, depth), config.generate_chunk) for depth in trained_depths(config)}


def drawn_depth(shares: dict[int, float], seed: int, step: int) -> int:
    """The number of steps of depth in one training step, from (seed, step). Steps of training are counted from 0."""
    drawn = np.random.RandomState([seed, step, 0]).random_sample()  # batches take [seed, epoch]
    at_least = np.cumsum(list(shares.values()))[:-1]
    return list(shares)[int(np.searchsorted(at_least, drawn, side="right"))]
