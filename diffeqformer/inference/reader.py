"""The second phase of a model, without the first: what compiled functions need to read tokens."""

import dataclasses

import jax
from flax import nnx
from jax.sharding import Mesh

from diffeqformer.depth.weights import StackedWeights
from diffeqformer.errors import UserError
from diffeqformer.parallel.sharding import on_every_device
from diffeqformer.solvers import SOLVERS
from diffeqformer.transformer import MODELS, Transformer, split_model, weights_at


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reader:
    """A model's structure and parameters, of which depth isn't used, and its weights on one grid."""

    graph: nnx.GraphDef = dataclasses.field(metadata={"static": True})
    params: dict
    weights: StackedWeights

    def model(self) -> Transformer:
        return nnx.merge(self.graph, self.params)


def without_depth(model: Transformer) -> Transformer:
    """A copy without depth weights, which reads tokens with weights that are given. It shares the other parameters."""
    reader = nnx.merge(*split_model(model))
    del reader.depth
    return reader


def with_solver(model: Transformer, name: str, config) -> Transformer:
    """A copy with another solver. It shares the parameters."""
    possible = MODELS[config.kind].solvers(model.unit_steps)
    if model.depth.fixed_depth:  # it has weights for the nodes of its own solver only
        possible = [other for other in possible if SOLVERS[other].nodes == SOLVERS[config.solver].nodes]
    if name not in possible:
        raise UserError(
            f"--solver: must be one of {', '.join(possible)} for this model of the kind {config.kind}, "
            f"but it is {name!r}"
        )
    return model.replace(solver=SOLVERS[name])


def split_reader(
    model: Transformer, num_steps: int | tuple[float, ...] | None = None, mesh: Mesh | None = None
) -> Reader:
    """What is needed of a model on one grid, without the many arrays of a hypernetwork.

    Args:
        num_steps: steps of depth, or the times at which they end; None: as trained.
        mesh: devices that each get a copy of all; None: everything stays where it is. Weights are made where the
            hypernetwork is, and divided like it.
    """
    reader = Reader(*split_model(without_depth(model)), weights_at(model, num_steps))
    return on_every_device(reader, mesh) if mesh else reader
