"""The products with a generator's P in training: by XLA, or by the Pallas kernels (`diffeqformer.kernels`).

Either way the gradient of P is a pair of factors, and only the optimizer makes dP of it: the kernels tile by tile, XLA
as a part of the update on TPUs. Elsewhere XLA stores dP.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float

from diffeqformer.depth.projection import Factors, project, project_with_factors, sum_of_squares
from diffeqformer.errors import UserError
from diffeqformer.parallel.sharding import EVERYWHERE, axes_of, on_each_device
from diffeqformer.transformer import Transformer


class Projections:
    """The linear layers of a generator on one mesh, and how the products with each P are computed.

    fused: the names of the layers that use the kernels, in an order that is the same in every process.
    how: what every kernel is told: the chip, and whether it is interpreted.
    precision: that of the products (`diffeqformer.fields.layers.PRECISIONS`).
    description: what is used, and why it isn't the kernels, for the log.

    Args:
        specs: the partition specs of the generator's layers, {layer: {projection | constant | ...: spec}}.
        generator_specs: those of the weights that it makes, {layer: {kernel | bias: spec}}.
        wanted: one of `depth.projection.KERNELS`; a UserError says if a layer can't use it.
    """

    def __init__(self, model: Transformer, specs: dict, generator_specs: dict, mesh: Mesh, wanted: str):
        layers = nnx.to_pure_dict(nnx.state(model.depth))["layers"]
        self.shapes = {name: layer["projection"].shape for name, layer in layers.items() if "projection" in layer}
        self.specs, self.generator_specs, self.mesh = specs, generator_specs, mesh
        self.precision = model.depth.precision
        platform = mesh.devices.flat[0].platform
        self.interpret, self.on_cpu = platform != "tpu", platform == "cpu"
        self.fused, self.how, self.description = [], {}, "XLA"
        if not (wanted == "pallas" or (wanted == "auto" and platform == "tpu")):
            return
        from diffeqformer.kernels.blocks import chip_of, reason_against

        times, chip = model.most_steps * len(model.solver.nodes), chip_of(mesh.devices.flat[0])
        self.how, against = {"chip": chip, "interpret": self.interpret}, {}
        for name, shape in self.shapes.items():
            inputs, width, outputs = NamedSharding(mesh, specs[name]["projection"]).shard_shape(shape)
            against[name] = reason_against(times, width, inputs, outputs, chip)
        reasons = "; ".join(f"{name}: {reason}" for name, reason in against.items() if reason)
        if wanted == "pallas" and reasons:
            raise UserError(
                f"config.kernels: must be auto or xla for this model and mesh ({reasons}), but it is 'pallas'"
            )
        self.fused = [name for name, reason in against.items() if reason is None]  # in order: a set has none
        if self.fused:
            self.description = "Pallas, interpreted" if self.interpret else "Pallas"
        if reasons:
            self.description += f" (XLA for {reasons})" if self.fused else f" ({reasons})"

    def factors(self, times: int, summed_type: jnp.dtype) -> dict[str, Factors]:
        """For each layer, factors of the right shapes, to differentiate with respect to, with dW in `summed_type`."""
        made = {}
        for name, (inputs, width, outputs) in self.shapes.items():
            kernel = jnp.zeros((times, inputs, outputs), summed_type)
            made[name] = Factors(jnp.zeros((times, width), jnp.float32), kernel, jnp.float32(0))
        return made

    def projects(self, factors: dict[str, Factors], made_type: jnp.dtype) -> dict[str, Callable]:
        """For each layer, what takes the place of `project`: the gradient of P is that of these `factors`.

        Pallas kernels make the weights in `made_type`.
        """
        made = {}
        for name, of in factors.items():
            projects, gradients = self._products(name, made_type)
            made[name] = functools.partial(project_with_factors, factors=of, projects=projects, gradients=gradients)
        return made

    def _products(self, name: str, made_type: jnp.dtype) -> tuple[Callable, Callable]:
        """The last two arguments of `project_with_factors` for a layer."""
        if name not in self.fused:
            return project, self._xla_gradients
        from diffeqformer.kernels import generator

        specs, made = self.specs[name], self.generator_specs[name]["kernel"]
        cut = axes_of(specs["projection"])

        def summed_gradients(h, projection, d_kernel):
            d_h, d_constant, squares = generator.gradients(h, projection, d_kernel, **self.how)
            return jax.lax.psum(d_h, cut), d_constant, jax.lax.psum(squares, cut)

        project_here = functools.partial(generator.project, dtype=made_type, **self.how)
        places = (EVERYWHERE, specs["projection"], specs["constant"])
        results = EVERYWHERE, specs["constant"], EVERYWHERE
        return (
            on_each_device(self.mesh, project_here, places, made),
            on_each_device(self.mesh, summed_gradients, (*places[:2], made), results),
        )

    def _xla_gradients(self, h, projection, d_kernel):
        """On a CPU, dP is stored in any case, so its squares are summed."""
        squares = jnp.sum(Factors(h, d_kernel, 0).product() ** 2) if self.on_cpu else sum_of_squares(h, d_kernel)
        d_h = jnp.einsum("ito,ieo->ite", d_kernel.swapaxes(0, 1), projection).sum(0)
        return d_h, d_kernel.sum(0, dtype=jnp.float32), squares

    def update(
        self,
        name: str,
        factors: Factors,
        state: Sequence[Float[Array, "inputs E outputs"]],
        scalars: Float[Array, "4"],
        **adamw: float,
    ) -> tuple[Array, Array, Array]:
        """P and its moments, which are the `state`, after an update by the kernel (`kernels.generator.update`)."""
        from diffeqformer.kernels.generator import update

        update_here = functools.partial(update, **self.how, **adamw)
        place, made = self.specs[name]["projection"], self.generator_specs[name]["kernel"]
        places = EVERYWHERE, made, place, place, place, EVERYWHERE
        on_devices = on_each_device(self.mesh, update_here, places, (place, place, place))
        return on_devices(factors.h, factors.d_kernel, *state, scalars)
