"""How an output token depends on input tokens along the trajectory: sections 5.2 and B of the paper.

Equation (7) treats the input token `in` and the output token `out` as an isolated system,

    dY/dt = J(t) Y,   Y(0) = I,   J = df_out/dx_in   [D, D],

which is integrated here with the model's own steps: Y_{n+1} = (I + J_n) Y_n, where J_n is the derivative of the
increment of x_out in step n with respect to x_in before that step. After each step Y = QR. The exponents are the sums
of log |diag R| over all steps (the paper's time is 1). They are 0 for a token without influence. They ignore changes of
x_in itself and paths through other tokens, except within a step of a solver that evaluates the attention several times.
Over few steps they depend on the order of the coordinates. `total_derivative` includes all paths.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from threadpoolctl import threadpool_limits

from diffeqformer.console.terminal import show_progress
from diffeqformer.depth.grid import Grid
from diffeqformer.errors import UserError
from diffeqformer.fields.field import VectorField
from diffeqformer.fields.layers import Context
from diffeqformer.solvers import SOLVERS, walk
from diffeqformer.solvers.solver import x_alone
from diffeqformer.transformer import Transformer, weights_at

CHUNK = 64  # number of rows of a Jacobian that are computed at once, or between two reports of progress
OTHERS_WAIT = [SOLVERS[name] for name in ("euler", "lie_trotter")]  # with these, other tokens move only at its end


class LastToken(VectorField):
    """A vector field at the last token only. The token attends to the keys and values of a whole state x."""

    def __init__(self, field: VectorField, x: Float[Array, "B S D"]):
        self.field, self.x = field, x

    def attention(self, weights: dict, row: Float[Array, "B 1 D"], context: Context) -> Float[Array, "B 1 D"]:
        """The attention branch at the last token, whose state is `row`."""
        kept = []

        def keep(query, key, value):
            kept.append((key, value))
            return query  # of the right shape; the result isn't used

        self.field.attention(weights, self.x, context._replace(attend=keep))
        [(key, value)] = kept

        def attend(query, *_):
            return jax.nn.dot_product_attention(query, key, value)

        return self.field.attention(weights, row, context._replace(attend=attend, position=self.x.shape[1] - 1))

    def feed_forward(self, weights: dict, row: Float[Array, "B 1 D"], context: Context) -> Float[Array, "B 1 D"]:
        return self.field.feed_forward(weights, row, context)


@functools.partial(jax.jit, static_argnames=("solver", "field"), donate_argnames="tangents")
def advance(solver, field, layers, dt, x, tangents):
    """Y -> (I + J) Y for every input token, [S, D, D], as Q and log |diag R|, in the step from the state x."""
    others_wait = solver in OTHERS_WAIT

    def increment_of_last(x):
        moving, here = (LastToken(field, x), x[:, -1:]) if others_wait else (field, x)
        return (solver.step(moving, layers, here, dt, Context()) - here)[0, -1]

    increment, pull = jax.vjp(increment_of_last, x)
    rows = jnp.eye(increment.size, dtype=increment.dtype)
    at_once = CHUNK if others_wait else 1  # as below
    jacobian = jax.lax.map(lambda row: pull(row)[0][0], rows, batch_size=at_once).swapaxes(0, 1)  # [S, out, in]

    def orthogonal(of_token):  # a few tokens at a time: for all of them, each array here would have S D^2 numbers
        tangent, block = of_token
        q, triangle = jnp.linalg.qr(tangent + block @ tangent)
        return q, jnp.log(jnp.abs(jnp.diagonal(triangle)))

    return jax.lax.map(orthogonal, (tangents, jacobian), batch_size=CHUNK // 4)


def exponents(
    model: Transformer, tokens: Int[Array, "S"], num_steps: int | None = None, *, published: bool = False
) -> Float[np.ndarray, "T S D"]:
    """Each step's contribution to the D exponents of the last token with respect to every token, itself included.

    The exponents are the sums over the steps; the largest is the paper's sensitivity. To analyze a token in the middle,
    cut the text after it: it doesn't depend on later tokens.

    Args:
        published: take the derivative at each step as the authors' code does: with the weights at the step's start and
            the state at its end. Its weights must be generated, and its solver Euler's.

    A UserError says if the model's solver carries more than the state.
    """
    solver = model.solver
    if solver.begin is not x_alone:
        raise UserError("exponents: they follow the state alone, and this solver also carries another array")
    weights = weights_at(model, num_steps)
    states = model.trajectory(tokens[None], weights)
    if published:
        starts = Grid.of(model.grid(num_steps).ends, nodes=(0.0,))
        weights, states = model.stack(model.depth(starts), weights.step_sizes), states[1:]
    tangents = jnp.tile(jnp.eye(model.field.width, dtype=jnp.float32), (len(tokens), 1, 1))
    added, steps, show = [], len(weights.step_sizes), show_progress("exponents", "steps")
    with threadpool_limits(1, "blas"):  # for the QR: under load, its threads wait for one another
        for step in range(steps):
            layers, dt = weights.at_step(step, len(solver.nodes))
            tangents, logs = advance(solver, model.field, layers, dt, states[step], tangents)
            added.append(np.asarray(logs))
            show(step + 1, steps)
    return np.stack(added)


@functools.partial(jax.jit, static_argnames=("solver", "field"))
def _pull_back(solver, field, weights, x, rows):
    _, pull = jax.vjp(lambda x: walk(solver, field, weights, x[None], Context())[0, -1], x)
    # One after another: XLA of jaxlib 0.10 for CPUs gets norms wrong if many rows are pulled back through all tokens.
    return jax.lax.map(lambda row: pull(row)[0], rows)


def total_derivative(
    model: Transformer, tokens: Int[Array, "S"], num_steps: int | None = None
) -> Float[np.ndarray, "S out D"]:
    """The derivative of the last token's state x(1) with respect to every token's x(0), along all paths."""
    weights = weights_at(model, num_steps)
    x = model.embed(tokens[None], Context())[0]
    rows, parts, show = jnp.eye(x.shape[-1], dtype=x.dtype), [], show_progress("total derivative", "rows")
    for start in range(0, len(rows), CHUNK):
        parts.append(np.asarray(_pull_back(model.solver, model.field, weights, x, rows[start : start + CHUNK])))
        show(min(start + CHUNK, len(rows)), len(rows))
    return np.concatenate(parts).swapaxes(0, 1)
