"""How an output token depends on input tokens along the trajectory: sections 5.2 and B of the paper.

Equation (7) treats the input token `in` and the output token `out` as a system of their own,

    dY/dt = J(t) Y,   Y(0) = I,   J = df_out/dx_in   [D, D],

followed here by the steps in which the model itself is walked: Y_{n+1} = (I + J_n) Y_n, where J_n is the derivative of what
step n adds to x_out with respect to x_in before that step. After each step Y = QR; the exponents are the sums over the steps
of log |diag R|, over the whole depth (the paper's time is 1). They are 0 for a token without influence. Neither other
tokens (but within a step of a solver that evaluates the attention several times) nor what becomes of x_in itself are part of
it, and over so few steps the QR's exponents depend on the order of the coordinates. `total_derivative` has all paths.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from threadpoolctl import threadpool_limits

from diffeqformer.depth.plain import stage_times
from diffeqformer.errors import UserError
from diffeqformer.fields.layers import Context
from diffeqformer.solvers import SOLVERS, Solver, walk
from diffeqformer.transformer import Transformer, weights_at

CHUNK = 64  # rows of a Jacobian that are computed at once
OTHERS_WAIT = SOLVERS["euler"], SOLVERS["lie_trotter"]  # solvers that let other tokens move at the end of a step alone


class LastToken:
    """A vector field at the last token alone, which attends to the keys and values of a whole state.

    Args:
        field: the vector field of all tokens.
        x: the state [B, S, D].
    """

    def __init__(self, field, x: Float[Array, "B S D"]):
        self.field, self.x = field, x

    def attention(self, weights: dict, row: Float[Array, "B 1 D"], context: Context) -> Float[Array, "B 1 D"]:
        """The attention branch at the last token, whose state is `row`."""
        kept = []

        def keep(query, key, value):
            kept.append((key, value))
            return value

        self.field.attention(weights, self.x, context._replace(attend=keep))
        [(key, value)] = kept
        attend = lambda query, *_: jax.nn.dot_product_attention(query, key, value)  # noqa: E731
        return self.field.attention(weights, row, context._replace(attend=attend, position=self.x.shape[1] - 1))

    def feed_forward(self, weights: dict, row: Float[Array, "B 1 D"], context: Context) -> Float[Array, "B 1 D"]:
        """The feed-forward branch."""
        return self.field.feed_forward(weights, row, context)

    def __call__(self, weights: dict, row: Float[Array, "B 1 D"], context: Context) -> Float[Array, "B 1 D"]:
        """dx/dt at the last token."""
        return self.attention(weights, row, context) + self.feed_forward(weights, row, context)


def last_increment(
    solver: Solver, field, layers: list[dict], x: Float[Array, "B S D"], dt: Float[Array, ""]
) -> Float[Array, "B D"]:
    """What one step adds to the last token's state.

    Args:
        layers: the weights at each of the solver's nodes in this step.
        dt: the length of the step.
    """
    row = x[:, -1:]
    if solver in OTHERS_WAIT:
        return (solver.step(LastToken(field, x), layers, row, dt, Context()) - row)[:, 0]
    return (solver.step(field, layers, x, dt, Context()) - x)[:, -1]


@functools.partial(jax.jit, static_argnames=("solver", "field"), donate_argnames="tangents")
def _advance(solver, field, layers, dt, x, tangents):
    """Y -> (I + J) Y for every input token, as Q and log |diag R|."""
    increment, pull = jax.vjp(lambda x: last_increment(solver, field, layers, x[None], dt)[0], x)
    rows = jnp.eye(increment.size, dtype=increment.dtype)
    jacobian = jax.lax.map(lambda row: pull(row)[0], rows, batch_size=CHUNK).swapaxes(0, 1)  # [S, out, in]

    def orthogonal(of_token):  # a few tokens at a time, since each of these takes S D^2 numbers for all of them
        tangent, block = of_token
        tangent, triangle = jnp.linalg.qr(tangent + block @ tangent)
        return tangent, jnp.log(jnp.abs(jnp.diagonal(triangle)))

    return jax.lax.map(orthogonal, (tangents, jacobian), batch_size=CHUNK // 4)


def check_published(model: Transformer) -> None:
    """Whether the authors' pairing of times and states means anything for a model.

    Raises:
        UserError: if not.
    """
    if model.solver != SOLVERS["euler"] or not hasattr(model.depth, "from_features"):
        raise UserError("--published_pairing: the authors' pairing of times needs generated weights and Euler's method")


def exponents(
    model: Transformer,
    tokens: Int[Array, "S"],
    num_steps: int | None = None,
    *,
    published: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Float[np.ndarray, "T S D"]:
    """What each step adds to the D exponents of the last token with respect to every token of a text, itself included.

    Their sum over the steps are the exponents, the largest of which is the paper's sensitivity. For a token in the
    middle, leave out those behind it, on which it doesn't depend.

    Args:
        num_steps: of depth; by default as trained.
        published: take the derivative at each step as the authors' code does, for the weights at the step's start and the state at
            its end, which never met.
        progress: told how many steps of how many are done.

    Raises:
        UserError: if `published` is asked of a model whose weights aren't generated or whose solver isn't Euler's, or if the
            model can't take that number of steps.
    """
    weights, solver = weights_at(model, num_steps), model.solver
    states = model.trajectory(tokens[None], weights)[:, 0]
    if published:
        check_published(model)
        starts = stage_times(model.times(num_steps), (0.0,))
        weights, states = model.stack(model.depth(starts), weights.step_sizes), states[1:]
    tangents = jnp.tile(jnp.eye(states.shape[-1]), (len(tokens), 1, 1))
    added, steps = [], len(weights.step_sizes)
    with threadpool_limits(
        1, "blas"
    ):  # which the QR is of; beside other work its threads wait for one another, tens of times as long
        for step in range(steps):
            layers, dt = weights.at_step(step, len(solver.nodes))
            tangents, logs = _advance(solver, model.field, layers, dt, states[step], tangents)
            added.append(np.asarray(logs))
            progress(step + 1, steps)
    return np.stack(added)


@functools.partial(jax.jit, static_argnames=("solver", "field"))
def _pull_back(solver, field, weights, x, rows):
    _, pull = jax.vjp(lambda x: walk(solver, field, weights, x[None], Context())[0, -1], x)
    return jax.vmap(lambda row: pull(row)[0])(rows)


def total_derivative(
    model: Transformer,
    tokens: Int[Array, "S"],
    num_steps: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Float[np.ndarray, "S out D"]:
    """The derivative of the last token's state x(1) with respect to every token's x(0), along all paths.

    Args:
        num_steps: of depth; by default as trained.
        progress: told how many rows of how many are done.
    """
    weights = weights_at(model, num_steps)
    x = model.embed(tokens[None], Context())[0]
    # The pull-back through the attention takes H S^2 numbers for each row.
    rows, at_once = jnp.eye(x.shape[-1]), max(1, CHUNK * 256**2 // max(256, len(tokens)) ** 2)
    parts = []
    for start in range(0, len(rows), at_once):
        parts.append(np.asarray(_pull_back(model.solver, model.field, weights, x, rows[start : start + at_once])))
        progress(min(start + at_once, len(rows)), len(rows))
    return np.concatenate(parts).swapaxes(0, 1)


@functools.partial(jax.jit, static_argnames=("solver", "field", "count", "passes"))
def _largest_exponents(solver, field, weights, x, directions, count, tolerance, passes):
    """Logarithms of the largest singular values of the derivative of x(1) by x(0), by subspace iteration, and their last change."""
    _, push = jax.linearize(lambda x: walk(solver, field, weights, x[None], Context())[0], x)
    pull = jax.linear_transpose(push, x)

    def apply(linear, vectors):
        return jax.lax.map(linear, vectors.T.reshape(-1, *x.shape), batch_size=CHUNK // 4).reshape(-1, x.size).T

    def there_and_back(carry):
        directions, before, _, done = carry
        images, triangle = jnp.linalg.qr(apply(push, directions))
        found = jnp.log(jnp.linalg.svd(triangle, compute_uv=False)[:count])
        change = jnp.where(found == before, 0, jnp.abs(found - before)).max()
        return jnp.linalg.qr(apply(lambda vector: pull(vector)[0], images))[0], found, change, done + 1

    going_on = lambda carry: (carry[3] < passes) & ~(carry[2] <= tolerance)  # noqa: E731
    start = (directions, jnp.full(count, jnp.inf), jnp.asarray(jnp.inf), 0)
    return jax.lax.while_loop(going_on, there_and_back, start)[1:3]


def flow_exponents(
    model: Transformer,
    tokens: Int[Array, "S"],
    count: int,
    num_steps: int | None = None,
    tolerance: float = 1e-3,
    passes: int = 100,
    seed: int = 0,
) -> tuple[Float[np.ndarray, "k"], float]:
    """The `count` largest exponents of the flow of all tokens over the whole depth, equation (8) at t = 1, in order.

    They are the logarithms of the largest singular values of the derivative of x(1) by x(0), found by subspace iteration:
    tangent vectors are carried forward, their images pulled back, and made orthogonal each time. They come from below.

    Args:
        tolerance: iterate until a pass, forward and back, changes none of them by more.
        passes: at most so many.

    Returns:
        the exponents, and by how much the last pass changed them.
    """
    weights, x = weights_at(model, num_steps), model.embed(tokens[None], Context())[0]
    count = min(count, x.size)
    more = min(2 * count + 8, x.size)  # the last of a subspace are the least exact
    directions = jnp.linalg.qr(jax.random.normal(jax.random.key(seed), (x.size, more)))[0]
    limits = jnp.float32(tolerance), passes
    with threadpool_limits(1, "blas"):
        found, change = _largest_exponents(model.solver, model.field, weights, x, directions, count, *limits)
        return np.asarray(found, np.float64), float(change)


def kaplan_yorke(exponents: Float[np.ndarray, "k"]) -> float | None:
    """The Kaplan-Yorke dimension of the largest exponents of a flow; None where they are too few to define it, or not numbers.

    @inproceedings{kaplan1979chaotic,
      title={Chaotic behavior of multidimensional difference equations},
      author={Kaplan, James L and Yorke, James A},
      booktitle={Functional Differential Equations and Approximation of Fixed Points},
      year={1979}}
    """
    exponents = np.sort(np.asarray(exponents, np.float64))[::-1]
    sums = np.cumsum(exponents)
    if np.isnan(sums).any() or (sums >= 0).all():
        return None
    whole = int(np.argmax(sums < 0))  # the first sum below zero has one exponent too many
    return whole + (sums[whole - 1] / -exponents[whole] if whole else 0.0)
