"""The simulation and the clustering measure: results that are known in advance."""

import functools
from unittest import mock

import numpy as np
import pytest

from diffeqformer.analysis import simulation
from diffeqformer.analysis.clustering import relative_distances
from diffeqformer.analysis.simulation import simulate
from diffeqformer.checkpoints.checkpoint import Checkpoint


def test_one_particle_and_one_weight_grow_as_the_differential_equation_says():
    """A single particle attends only to itself: dx/dt = s(t) V x, so its growth follows from the integral of s."""
    for degree, equal_total, integral in ((0, False, 2.0), (2, False, 2 / 3), (2, True, 2.0)):
        [path] = simulate(degree, equal_total=equal_total, particles=1, dimensions=1, steps=4000, horizon=2.0)
        random = np.random.RandomState(0)
        start, value = random.uniform(-1, 1), random.randn(3)[2]
        assert path.shape == (4001, 1, 1) and path[0, 0, 0] == start
        assert path[-1, 0, 0] / start == pytest.approx(np.exp(integral * value), rel=1e-2)


def closest(degree: int, equal_total: bool = False) -> float:
    """The lower quartile of the last distances, relative to the root mean square, averaged over draws."""
    last = simulate(degree, equal_total=equal_total, draws=100)[:, -1]
    return np.mean([relative_distances(x[None])[0][0, 1] for x in last])


def test_growing_weights_gather_particles_as_constant_ones_do_if_their_totals_are_equal():
    constant, growing, with_equal_totals = closest(0), closest(3), closest(3, equal_total=True)
    assert growing > 1.3 * constant and with_equal_totals == pytest.approx(constant, rel=0.12)


def test_relative_distances_see_clusters_but_neither_size_nor_place():
    random = np.random.RandomState(1)
    swarm = random.randn(60, 3)
    clusters = np.repeat(random.randn(3, 3), 20, axis=0) + 1e-3 * swarm
    quantiles, sizes = relative_distances(np.stack([swarm, 5 * swarm + 7, clusters, np.zeros((60, 3))]))
    np.testing.assert_allclose(quantiles[0], quantiles[1], rtol=1e-9)
    assert sizes[1] == pytest.approx(5 * sizes[0]) and (quantiles[3] == 0).all() and sizes[3] == 0
    assert quantiles[0, 0] > 0.3
    assert quantiles[2, 1] < 0.01 < 0.5 < quantiles[2, 2]  # 19 of 59 others are in one's own cluster
    pairs = np.linalg.norm(swarm[:, None] - swarm, axis=-1)[np.triu_indices(60, 1)]
    assert sizes[0] == pytest.approx(np.sqrt((pairs**2).mean()))
    assert quantiles[0, 2] == pytest.approx(np.median(pairs) / sizes[0])


def test_the_report_draws_the_simulation_with_its_control(monkeypatch):
    monkeypatch.setattr(simulation, "DRAWS", 2)
    monkeypatch.setattr(simulation, "simulate", functools.partial(simulate, particles=4, steps=40))
    found = simulation.section(mock.Mock(Checkpoint))
    assert found.html.count("<img") == 2 and found.arrays["equal_end/constant/paths"].shape == (41, 4, 3)
    kinds = [kind for kind in found.numbers if kind.startswith("equal")]
    assert len({str(found.numbers[kind]["constant"]) for kind in kinds}) == 1
    assert len({str(found.numbers[kind]["degree 3"]) for kind in kinds}) == 2
