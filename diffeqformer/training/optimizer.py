"""AdamW as published, or Muon: clipping, weight decay masks, warm-up and cosine decay, or a stable rate."""

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from flax import traverse_util
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from diffeqformer.depth.projection import Factors
from diffeqformer.fields.layers import at_its_precision
from diffeqformer.rules import decay_start
from diffeqformer.training.projections import Projections
from diffeqformer.transformer import Transformer, merge_trees, parameter_metadata, select

MATRICES = ("kernel", "projection", "constant")
"""The parameters of depth weights that Muon updates: kernels, and a generator's P, as E matrices, and B."""
BETA1 = 0.9  # the decay of Adam's first moment, per step
MOMENTUM = 0.95
UPDATE_RMS = 0.2

_ORTHOGONAL = optax.contrib.scale_by_muon(
    beta=0.0, nesterov=False, weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(1, 2)
)


def learning_rate_schedule(config: ConfigDict) -> optax.Schedule:
    """A warm-up from 0, then a cosine down to `final_fraction` of the peak: section C.4 of the paper.

    With the schedule `wsd` (warm-up, stable, decay) the peak rate is kept until `decay_start`, and then goes down in a
    line. Until there it doesn't depend on the number of steps. The rate of the first update is 0 if there is a warm-up.

    @inproceedings{hu2024minicpm,
      title={{MiniCPM}: Unveiling the Potential of Small Language Models with Scalable Training Strategies},
      author={Hu, Shengding and others},
      booktitle={Conference on Language Modeling},
      year={2024}
    }
    """
    steps, config, decay = config.steps, config.optimizer, decay_start(config)
    peak, final = config.learning_rate, config.final_fraction * config.learning_rate
    if config.schedule == "wsd":
        start = 0.0 if config.warmup_steps else peak
        stable = optax.linear_schedule(start, peak, max(config.warmup_steps, 1))
        return optax.join_schedules([stable, optax.linear_schedule(peak, final, max(steps - decay, 1))], [decay])
    warmup_steps = min(round(config.warmup_fraction * steps), steps - 1)
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0 if warmup_steps else peak,
        peak_value=peak,
        warmup_steps=warmup_steps,
        decay_steps=steps,
        end_value=final,
    )


def decay_mask(model: Transformer, decay: str) -> dict:
    """Which parameters get weight decay: a tree like the parameters.

    Args:
        decay: one of these, `config.optimizer.decay`.
            as_published: as in the authors' pretraining. Embeddings decay, and so do the kernels of per-layer weights,
            shared weights and adapters. A generator's parameters don't. In a DiffEqFormer with the block of a Llama,
            all parameters decay.
            everything: all of them, as in the authors' fine-tuning and the pretraining for it.
            matrices: those that are matrices, or one for each time, and all of a generator's but its MLP's biases;
            other biases and norms don't.
    """
    if decay == "matrices":
        axes = parameter_metadata(model, "axes")
        return jax.tree.map(
            lambda axes: sum(axis != "time" for axis in axes) > 1, axes, is_leaf=lambda leaf: isinstance(leaf, tuple)
        )
    everything = decay == "everything" or (model.depth.continuous and model.field.generator_decays)
    return jax.tree.map(lambda decays: decays or everything, parameter_metadata(model, "decays"))


def orthogonal(matrices: Float[Array, "N inputs outputs"]) -> Float[Array, "N inputs outputs"]:
    """For each matrix U S V^T nearly U V^T, scaled to a root mean square of `UPDATE_RMS`.

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


def make_optimizer(
    config, decays: dict, clips: bool = True, places: dict | None = None
) -> optax.GradientTransformation:
    """AdamW over a run of `config.steps` updates, from its `optimizer` part; or Muon for `MATRICES` of depth weights.

    Args:
        decays: which of the trained parameters get weight decay.
        clips: False: gradients come clipped. The state is the same.
        places: the parameters' shardings, if there are several devices, which then share Muon's work.
    """
    schedule = learning_rate_schedule(config)
    optimizer = optax.adamw(
        schedule,
        b1=BETA1,
        b2=config.optimizer.beta2,
        eps=config.optimizer.epsilon,
        weight_decay=config.optimizer.weight_decay,
        mask=decays,
    )
    if config.optimizer.name == "muon":
        muon = optax.chain(
            optax.trace(decay=MOMENTUM, nesterov=True),
            orthogonalize(places),
            optax.add_decayed_weights(config.optimizer.weight_decay, decays),
            optax.scale_by_learning_rate(schedule),
        )
        labels = traverse_util.path_aware_map(
            lambda path, _: "muon" if path[0] == "depth" and path[-1] in MATRICES else "adamw", decays
        )
        optimizer = optax.partition({"muon": muon, "adamw": optimizer}, labels)
    clip_norm = config.optimizer.clip_norm
    if not clip_norm:
        return optimizer
    return optax.chain(optax.clip_by_global_norm(clip_norm) if clips else optax.identity(), optimizer)


class Optimizer:
    """Updates from gradients that have `Factors` in the place of each P, by its `projections`.

    The state and the other arguments are those of `make_optimizer`.
    """

    def __init__(self, config, decays: dict, projections: Projections | None, places: dict | None = None):
        self.config, self.projections = config.optimizer, projections
        self.precision = projections.precision if projections else "default"
        self.schedule = learning_rate_schedule(config)
        fused = projections.fused if projections and self.config.name == "adamw" else ()
        self.fused = {("depth", "layers", name, "projection"): name for name in fused}
        self.decays = traverse_util.flatten_dict(decays)
        self.whole = make_optimizer(config, decays, places=places)
        self.rest = make_optimizer(config, self._rest(decays), clips=False, places=places)

    def _rest(self, tree: dict) -> dict:
        """The part of a tree of parameters that optax updates, by `rest`. The kernels update the others."""
        return select(tree, lambda path: path not in self.fused)

    @at_its_precision
    def update(self, gradient: dict, state: optax.OptState, params: dict) -> tuple[dict, optax.OptState, Array]:
        """The new parameters and state, and the gradient's global norm."""
        leaves = jax.tree.leaves(gradient, is_leaf=is_factors)
        norm = jnp.sqrt(sum(leaf.sum_squares if is_factors(leaf) else jnp.sum(leaf**2) for leaf in leaves))
        limit = self.config.clip_norm

        def clip(leaf):
            leaf = leaf.product() if is_factors(leaf) else leaf
            return jax.lax.select(norm < limit, leaf, (leaf / norm.astype(leaf.dtype)) * limit) if limit else leaf

        clipped = jax.tree.map(clip, self._rest(gradient), is_leaf=is_factors)
        if not self.fused:
            updates, state = self.rest.update(clipped, state, params)
            return optax.apply_updates(params, updates), state, norm
        adam = optax.tree_utils.tree_get(state, "ScaleByAdamState")
        rest = optax.tree_utils.tree_set(state, mu=self._rest(adam.mu), nu=self._rest(adam.nu))
        updates, rest = self.rest.update(clipped, rest, self._rest(params))
        after = optax.tree_utils.tree_get(rest, "ScaleByAdamState")
        factor = jnp.where(norm < limit, 1.0, limit / norm) if limit else jnp.float32(1)
        fused = self._update_fused(gradient, factor, adam, params)
        updated = optax.apply_updates(self._rest(params), updates), after.mu, after.nu
        params, mu, nu = (merge_trees(*trees) for trees in zip(updated, fused))
        return params, optax.tree_utils.tree_set(rest, mu=mu, nu=nu), norm

    def _update_fused(self, gradient: dict, clip: Array, adam: optax.ScaleByAdamState, params: dict) -> list[dict]:
        """The parameters and moments that the kernels update."""
        config, count = self.config, adam.count + 1
        scalars = [clip, self.schedule(adam.count), 1 - BETA1**count, 1 - config.beta2**count]
        scalars = jnp.stack([jnp.asarray(scalar, jnp.float32) for scalar in scalars])
        gradient, *state = map(traverse_util.flatten_dict, (gradient, params, adam.mu, adam.nu))
        found: list[dict] = [{}, {}, {}]
        for path, name in self.fused.items():
            decay = config.weight_decay if self.decays[path] else 0.0
            constants = {"b1": BETA1, "b2": config.beta2, "eps": config.epsilon, "weight_decay": decay}
            new = self.projections.update(
                name, gradient[path], [leaves[path] for leaves in state], scalars, **constants
            )
            for leaves, leaf in zip(found, new):
                leaves[path] = leaf
        return [traverse_util.unflatten_dict(leaves) for leaves in found]


def is_factors(leaf) -> bool:
    """Whether a part of a tree of gradients is a pair of factors."""
    return isinstance(leaf, Factors)
