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


def orthogonal_on(place: NamedSharding | None, name: str, update: Array) -> Array:
    """`orthogonal` for a parameter with that name: a kernel with or without an axis of time, P or B.

    Args:
        place: the parameter's sharding. Its matrices are divided among all devices of the mesh, so that each is whole
            on a device and none is worked on twice. For this, one axis of the mesh after the other moves from rows or
            columns to the matrices, which is an all-to-all.
    """
    by_matrix = update.swapaxes(0, 1) if name == "projection" else update.reshape(-1, *update.shape[-2:])
    count, there, made = len(by_matrix), [], by_matrix
    if place is not None:
        spec = [*place.spec, *[None] * (update.ndim - len(place.spec))]
        there = _on_the_way(place.mesh, spec[0 if name == "projection" else -2], spec[-1])
        made = jnp.pad(made, ((0, -count % place.mesh.size), (0, 0), (0, 0)))
    for step in there:
        made = jax.lax.with_sharding_constraint(made, step)
    made = orthogonal(made)
    for step in there[::-1]:
        made = jax.lax.with_sharding_constraint(made, step)
    made = made[:count]
    return made.swapaxes(0, 1) if name == "projection" else made.reshape(update.shape)


def _on_the_way(mesh: Mesh, *cut: str | tuple[str, ...] | None) -> list[NamedSharding]:
    """The shardings of matrices [N, inputs, outputs], `cut` by axes for both, until each is whole on its device."""
    rows, columns = ((axes,) if isinstance(axes, str) else axes or () for axes in cut)
    rest = tuple(axis for axis in mesh.axis_names if axis not in (*rows, *columns))
    steps = (columns, rows), ((*columns, *rows),), ((*columns, *rows, *rest),)
    return [NamedSharding(mesh, PartitionSpec(*step)) for step in steps]


def orthogonalize(places: dict | None) -> optax.GradientTransformation:
    """`orthogonal_on` for a tree of parameters, of which `places` has the shardings."""
    flat = traverse_util.flatten_dict(places or {})

    def made(path, leaf):
        names = tuple(part.key for part in path)
        return orthogonal_on(flat.get(names), names[-1], leaf)

    return optax.stateless(lambda updates, params: jax.tree_util.tree_map_with_path(made, updates))


def with_muon(
    adamw: optax.GradientTransformation,
    schedule: optax.Schedule,
    weight_decay: float,
    decays: dict,
    places: dict | None = None,
) -> optax.GradientTransformation:
    """Muon for `MATRICES` of the depth weights, and `adamw` for the rest. The others are as in `make_optimizer`."""
    labels = traverse_util.path_aware_map(
        lambda path, _: "muon" if path[0] == "depth" and path[-1] in MATRICES else "adamw", decays
    )
    muon = optax.chain(
        optax.trace(decay=MOMENTUM, nesterov=True),
        orthogonalize(places),
        optax.add_decayed_weights(weight_decay, decays),
        optax.scale_by_learning_rate(schedule),
    )
    return optax.partition({"muon": muon, "adamw": adamw}, labels)
