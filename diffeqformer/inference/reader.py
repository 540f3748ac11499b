"""The second phase of a model, without the first: what compiled functions need to read tokens."""

from flax import nnx

from diffeqformer.depth.weights import StackedWeights
from diffeqformer.transformer import Transformer, split_model, weights_at


def split_reader(
    model: Transformer, num_steps: int | tuple[float, ...] | None = None
) -> tuple[nnx.GraphDef, dict, StackedWeights]:
    """A model's structure and parameters without its depth weights, and the weights on one grid.

    The many arrays of a hypernetwork are no longer needed, so each call takes fewer arguments.

    Args:
        num_steps: steps of depth, or the times at which they end; None: as trained.

    Raises:
        UserError: if the model can't take that number of steps.
    """
    weights, reader = weights_at(model, num_steps), nnx.merge(*split_model(model))
    del reader.depth
    return *split_model(reader), weights
