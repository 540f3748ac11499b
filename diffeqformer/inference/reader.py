"""The second phase of a model, without the first: what compiled functions need to read tokens."""

from flax import nnx
from jax.sharding import Mesh

from diffeqformer.depth.weights import StackedWeights
from diffeqformer.errors import UserError
from diffeqformer.parallel.sharding import on_every_device
from diffeqformer.solvers import SOLVERS
from diffeqformer.transformer import MODELS, Transformer, split_model, weights_at


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
) -> tuple[nnx.GraphDef, dict, StackedWeights]:
    """A model's structure and parameters without its depth weights, and the weights on one grid.

    The many arrays of a hypernetwork are no longer needed, so each call takes fewer arguments. Weights are made where
    the hypernetwork is, and divided like it.

    Args:
        num_steps: steps of depth, or the times at which they end; None: as trained.
        mesh: devices that each get a copy of all; None: everything stays where it is.
    """
    graph, params = split_model(without_depth(model))
    parts = params, weights_at(model, num_steps)
    return graph, *(on_every_device(parts, mesh) if mesh else parts)
