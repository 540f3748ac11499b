"""Lie-Trotter splitting. A vanilla transformer is an example of it.

@article{lu2019understanding,
  title={Understanding and Improving Transformer From a Multi-Particle Dynamic System Point of View},
  author={Lu, Yiping and Li, Zhuohan and He, Di and Sun, Zhiqing and Dong, Bin and Qin, Tao
          and Wang, Liwei and Liu, Tie-Yan},
  journal={arXiv:1906.02762},
  year={2019}}
"""

from jaxtyping import Array, Float

from diffeqformer.fields.field import VectorField
from diffeqformer.fields.layers import Context
from diffeqformer.solvers.solver import Solver


def step(
    field: VectorField, layers: list[dict], x: Float[Array, "B S D"], dt: Float[Array, ""], context: Context
) -> Float[Array, "B S D"]:
    """Attention over the whole step, then feed-forward over the whole step, each by Euler's method.

    With dt = 1 and weights per layer this is the pre-norm transformer.
    """
    [end] = layers
    x = x + dt * field.attention(end, x, context)
    return x + dt * field.feed_forward(end, x, context)


LIE_TROTTER = Solver(step, nodes=(1.0,), order=1)
