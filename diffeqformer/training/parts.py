"""Parts of the loss that are differentiated by themselves: each device computes with its own examples.

The path of a batch whose weights are made in chunks is a chain of them (`training.chunks`).
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import PyTree

from diffeqformer.parallel.mesh import AXES
from diffeqformer.parallel.sharding import EVERYWHERE, axes_of, gather, identity, on_each_device, scatter, sum_copies
from diffeqformer.training.loss import BY_EXAMPLE, split_batch


class Part(NamedTuple):
    """A part of the loss that each device computes with its own examples.

    function: (shared, states, fixed, inputs) -> what it computes, on a device. The states and the inputs are those of
        its examples; the derivatives by `shared` and by the states are wanted.
    spec: those of `shared`.
    result: the partition spec of what it computes.
    microbatches: the number of parts in which the examples are processed, one after the other.
    typed: what is done to `shared` before it is gathered. Its gradient is summed in its type from before.
    over: the axes of the mesh over which `shared` is gathered, once for all microbatches.
    """

    mesh: Mesh
    function: Callable
    spec: PyTree
    result: PartitionSpec = BY_EXAMPLE
    microbatches: int = 1
    typed: Callable[[PyTree], PyTree] = identity
    over: tuple[str, ...] = ()

    def gathered(self, shared: PyTree) -> PyTree:
        """What the function takes, on a device."""
        return gather(self.typed(shared), self.spec, self.over)

    def summed(self, gradient: PyTree, shared: PyTree) -> PyTree:
        """The device's part of the gradient of `shared`, from its own gradient of what the function takes."""
        typed = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), gradient, shared)
        return sum_copies(scatter(typed, self.spec, self.over), self.spec)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def computed(part: Part, shared: PyTree, states: PyTree, fixed: PyTree, inputs: PyTree) -> PyTree:
    """What a part computes. Its derivatives are computed by device, too, one microbatch after the other."""

    def on_device(shared, states, fixed, inputs):
        shared = part.gathered(shared)

        def one(number, kept, examples):
            return (), part.function(shared, examples[0], fixed, examples[1]), ()

        return by_microbatch(one, part.microbatches, (states, inputs))[1]

    places = part.spec, BY_EXAMPLE, EVERYWHERE, BY_EXAMPLE
    return on_each_device(part.mesh, on_device, places, part.result)(shared, states, fixed, inputs)


def _computed_forward(part, *arguments):
    return computed(part, *arguments), arguments


def _computed_backward(part, arguments, d_result):
    def on_device(d_result, shared, states, fixed, inputs):
        gathered = part.gathered(shared)

        def one(number, kept, examples):
            d_result, states, inputs = examples
            _, pull = jax.vjp(lambda *both: part.function(*both, fixed, inputs), gathered, states)
            d_shared, d_states = pull(shares(d_result, part.mesh, part.result))
            return (), d_states, d_shared

        _, d_states, d_shared = by_microbatch(one, part.microbatches, (d_result, states, inputs))
        return part.summed(d_shared, shared), summed_states(d_states)

    places = part.result, part.spec, BY_EXAMPLE, EVERYWHERE, BY_EXAMPLE
    return *on_each_device(part.mesh, on_device, places, (part.spec, BY_EXAMPLE))(d_result, *arguments), None, None


computed.defvjp(_computed_forward, _computed_backward)


def shares(cotangent: PyTree, mesh: Mesh, spec: PartitionSpec) -> PyTree:
    """A cotangent in equal shares, for the devices that hold copies of the same part and add up what follows."""
    copies = math.prod(mesh.shape[axis] for axis in AXES if axis not in axes_of(spec))
    return jax.tree.map(lambda leaf: leaf / copies, cotangent)


def summed_states(cotangent: PyTree) -> PyTree:
    """The sums of states' cotangents over the devices that share the work of the same examples."""
    return sum_copies(cotangent, jax.tree.map(lambda _: BY_EXAMPLE, cotangent))


def by_microbatch(
    function: Callable, microbatches: int, examples: PyTree, kept: PyTree = ()
) -> tuple[PyTree, PyTree, PyTree]:
    """(number of a microbatch, kept, examples) -> (kept, found for each example, to be added up), one after the other.

    Sums over several are in fp32.
    """
    if microbatches == 1:
        return function(0, kept, examples)
    parts = jax.tree.map(lambda array: split_batch(array, microbatches), examples)
    terms = jax.eval_shape(function, 0, kept, jax.tree.map(lambda array: array[0], parts))[2]

    def add(carry, inputs):
        (kept, total), (number, part) = carry, inputs
        kept, found, more = function(number, kept, part)
        return (kept, jax.tree.map(jnp.add, total, more)), found

    start = kept, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), terms)
    (kept, total), found = jax.lax.scan(add, start, (jnp.arange(microbatches), parts))
    return kept, jax.tree.map(lambda array: array.swapaxes(0, 1).reshape(-1, *array.shape[2:]), found), total
