"""Lie-Trotter splitting, which is what a vanilla transformer does.

@article{lu2019understanding,
  title={Understanding and Improving Transformer From a Multi-Particle Dynamic System Point of View},
  author={Lu, Yiping and Li, Zhuohan and He, Di and Sun, Zhiqing and Dong, Bin and Qin, Tao
          and Wang, Liwei and Liu, Tie-Yan},
  journal={arXiv:1906.02762},
  year={2019}}
"""

from jaxtyping import Array, Float

from diffeqformer.models.depth_weights import StackedWeights
from diffeqformer.models.layers import Context
from diffeqformer.solvers.walk import walk


def lie_trotter(field, weights: StackedWeights, x: Float[Array, "B S D"], context: Context, **options):
    """Attention over the whole step, then feed-forward over the whole step. Order 1.

    With dt = 1 and weights per layer this is the pre-norm transformer. Options and result as those of `walk`.
    """

    def step(layers, x, dt, context):
        x = x + dt * field.attention(layers, x, context)
        return x + dt * field.feed_forward(layers, x, context)

    return walk(step, weights, x, context, **options)
