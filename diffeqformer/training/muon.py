"""Muon: every update of a block's matrices is made orthogonal. AdamW has all other parameters.

@misc{jordan2024muon,
  title={Muon: An optimizer for hidden layers in neural networks},
  author={Jordan, Keller and Jin, Yuchen and Boza, Vlado and You, Jiacheng and Cesista, Franz and Newhouse, Laker
          and Bernstein, Jeremy},
  url={https://kellerjordan.github.io/posts/muon/}, year={2024}}

Updates have the root mean square that AdamW's usually have, so that both take the same learning rate:

@article{liu2025muon,
  title={Muon is Scalable for {LLM} Training},
  author={Liu, Jingyuan and Su, Jianlin and Yao, Xingcheng and others},
  journal={arXiv:2502.16982}, year={2025}}
"""

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from flax import traverse_util
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

MATRICES = ("kernel", "projection", "constant")
"""The parameters of depth weights that Muon updates: kernels, and a generator's P, as E matrices, and B."""
MOMENTUM = 0.95
UPDATE_RMS = 0.2

_ORTHOGONAL = optax.contrib.scale_by_muon(
    beta=0.0, nesterov=False, weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(1, 2)
)


def orthogonal(matrices: Float[Array, "N inputs outputs"]) -> Float[Array, "N inputs outputs"]:
    """For each matrix U S V^T nearly U V^T, scaled to a root mean square of `UPDATE_RMS`."""
    made, _ = _ORTHOGONAL.update(matrices, _ORTHOGONAL.init(matrices))
    return UPDATE_RMS * max(matrices.shape[1:]) ** 0.5 * made


def orthogonal_on(mesh: Mesh | None, name: str, update: Array) -> Array:
    """`orthogonal` for a parameter with that name: a kernel with or without an axis of time, P or B.

    Its matrices are divided among the devices of a mesh, whatever the parameter's own sharding is, so that none is
    worked on twice and each is whole on its device.
    """
    by_matrix = update.swapaxes(0, 1) if name == "projection" else update.reshape(-1, *update.shape[-2:])
    count = len(by_matrix)
    if mesh is not None:
        place = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        padded = jnp.pad(by_matrix, ((0, -count % mesh.size), (0, 0), (0, 0)))
        made = orthogonal(jax.lax.with_sharding_constraint(padded, place))
        made = jax.lax.with_sharding_constraint(made, place)[:count]
    else:
        made = orthogonal(by_matrix)
    return made.swapaxes(0, 1) if name == "projection" else made.reshape(update.shape)


def orthogonalize(mesh: Mesh | None) -> optax.GradientTransformation:
    """`orthogonal_on` for a tree of parameters."""

    def update(updates, state, params=None):
        del params
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: orthogonal_on(mesh, path[-1].key, leaf), updates
        ), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def with_muon(
    adamw: optax.GradientTransformation,
    schedule: optax.Schedule,
    weight_decay: float,
    decays: dict,
    mesh: Mesh | None = None,
) -> optax.GradientTransformation:
    """Muon for `MATRICES` of the depth weights, and another optimizer for the rest.

    Args:
        adamw: the other optimizer.
        schedule: the learning rate.
        weight_decay: decoupled.
        decays: which parameters get weight decay: a tree like the parameters.
        mesh: the devices that share the work.
    """
    labels = traverse_util.path_aware_map(
        lambda path, _: "muon" if path[0] == "depth" and path[-1] in MATRICES else "adamw", decays
    )
    muon = optax.chain(
        optax.trace(decay=MOMENTUM, nesterov=True),
        orthogonalize(mesh),
        optax.add_decayed_weights(weight_decay, decays),
        optax.scale_by_learning_rate(schedule),
    )
    return optax.partition({"muon": muon, "adamw": adamw}, labels)
