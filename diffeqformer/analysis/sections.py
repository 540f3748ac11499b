"""The parts of a report on a checkpoint: what was found, as figures and numbers.

Each is a function of an opened checkpoint that gives a `Section`, whose `html` a notebook can show by itself.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from diffeqformer.analysis import attention_maps, figures, lyapunov
from diffeqformer.analysis.clustering import HORIZON, QUANTILES, directions, relative_distances, simulate
from diffeqformer.analysis.report import Section, highlighted, paragraph, show_text, table
from diffeqformer.analysis.spectra import spectra as all_spectra
from diffeqformer.checkpoint import Checkpoint
from diffeqformer.console.progress import printable, show_progress
from diffeqformer.data.tokenizers import Tokenizer
from diffeqformer.depth.plain import stage_times
from diffeqformer.errors import UserError
from diffeqformer.transformer import Transformer, split_model, weights_at

DRAWS, SHOWN_EVERY = 20, 4  # of the simulation of clustering: draws, and steps between those that are measured


def check_finite(model: Transformer) -> None:
    """Raise a UserError if a parameter isn't finite."""
    for path, leaf in flatten_dict(split_model(model)[1]).items():
        if not jnp.isfinite(leaf).all():
            raise UserError(
                f"parameters: all must be finite, but {'/'.join(map(str, path))} isn't; python -m diffeqformer.inspect says more"
            )


def in_float32(section: Callable) -> Callable:
    """A section computed in fp32 throughout, whatever the checkpoint's types and the backend's usual precision."""

    @functools.wraps(section)
    def run(opened: Checkpoint, *arguments, **options):
        float32 = jnp.dtype(jnp.float32)
        model = opened.model.replace(dtype=float32, state_dtype=float32)
        with jax.default_matmul_precision("highest"):
            return section(dataclasses.replace(opened, model=model), *arguments, **options)

    return run


def check_text(model: Transformer, ids: list[int], name: str = "the text") -> None:
    """Whether a text can be looked at.

    Args:
        name: by which the user gave it.

    Raises:
        UserError: if it is too short, or longer than the model has positions.
    """
    if not 2 <= len(ids) <= model.max_length:
        raise UserError(
            f"{name}: must have at least 2 tokens and at most {model.max_length:,}, the positions of this model, but it "
            f"has {len(ids):,}"
        )


def check_heads(model: Transformer, heads: Sequence[int], name: str = "heads") -> None:
    """Raise a UserError if the model doesn't have one of these heads."""
    for head in heads:
        if not 0 <= head < model.field.heads:
            raise UserError(
                f"{name}: this model has the heads 0 to {model.field.heads - 1}, but one asked for is {head}"
            )


def time_label(model: Transformer) -> str:
    return "layer" if model.unit_steps else "t"


def readable_ids(tokenizer: Tokenizer) -> list[int]:
    """The ids of tokens that a text can consist of: no end of text, no parts of characters, no control characters."""
    texts = ((i, tokenizer.decode([i])) for i in range(tokenizer.vocab_size) if i != tokenizer.end_of_text)
    return [i for i, text in texts if text and "\ufffd" not in text and (text.isprintable() or text.isspace())]


def first_nodes(model: Transformer, num_steps: int | None) -> np.ndarray:
    """When the model's solver first evaluates the attention in each step."""
    return stage_times(model.times(num_steps), model.solver.nodes)[:: len(model.solver.nodes)]


@in_float32
def spectra(
    opened: Checkpoint,
    times: int | None = None,
    heads: Sequence[int] = (),
    feed_forward: bool = True,
    num_steps: int | None = None,
) -> Section:
    """Eigenvalues and singular values of QK, OV and the feed-forward's products over time.

    Args:
        times: how many, evenly over the depth; by default those at which the steps take weights.
        heads: whose eigenvalues are drawn; by default the four whose are largest.
        feed_forward: its products as well, which take longest.
        num_steps: of depth; by default as trained.

    Raises:
        UserError: if there is no such head, or there are no weights at these times.
    """
    model = opened.model
    check_heads(model, heads)
    at = np.unique(stage_times(model.times(num_steps), model.solver.nodes)) if times is None else model.times(times)
    start = time.monotonic()
    found = all_spectra(model, at, feed_forward)
    seconds, at = time.monotonic() - start, at[-len(found["QK"].eigenvalues) :]  # one set for all times: the last one
    shown = [
        paragraph(
            "Eigenvalues of the products of weights that move a state. QK (before 1 / sqrt(K)) decides who attends to whom: "
            "along the direction of a positive real part, to those that are alike. OV is what is received: positive real parts copy "
            "and attract along their direction, negative ones repel. The feed-forward's products leave its activation aside. "
            "So are biases and norms; rotary positions are those of a token and itself. A product of a D x n and an n x D matrix has "
            "D - n eigenvalues that are 0 whatever the weights: they are left out. Effective rank: the exponential of the entropy of the singular values."
        )
    ]
    numbers, arrays, rows = {"times": at.tolist(), "seconds": seconds}, {"times": at}, []
    for name, one in found.items():
        largest = np.argsort(-one.radius().max(0))[:4].tolist()
        chosen = [0] if one.eigenvalues.shape[1] == 1 else list(heads) or sorted(largest)
        shown.append(figures.as_html(figures.spectrum(name, one, at, time_label(model), chosen), f"spectrum of {name}"))
        of_heads = {name: getattr(one, name)() for name in ("radius", "positive_share", "effective_rank")}
        numbers[name] = {name: values.tolist() for name, values in of_heads.items()}
        arrays |= {f"{name}/eigenvalues": one.eigenvalues, f"{name}/singular_values": one.singular_values}
        means = [float(of_heads[name].mean()) for name in ("positive_share", "effective_rank")]
        rows.append([name, float(one.radius().max()), *means])
    shown.insert(1, table(["product", "largest radius", "mean positive share", "mean effective rank"], rows))
    print(f"eigenvalues and singular values in {seconds:.1f} s, times: {len(at)}", flush=True)
    return Section("spectra", "Spectra over time", "".join(shown), numbers, arrays)


@in_float32
def induction(opened: Checkpoint, num_steps: int | None = None) -> Section:
    """Induction scores beside the signs of the spectra."""
    model = opened.model
    times, ids = first_nodes(model, num_steps), readable_ids(opened.tokenizer)
    length = min(64, model.max_length // 2, len(ids))
    scores = attention_maps.induction_scores(model, ids, length, num_steps=num_steps)
    found = all_spectra(model, times, feed_forward=False)
    even = float(np.mean(1 / np.arange(length + 1, 2 * length + 1)))
    order = np.argsort(-scores, axis=None)[:5]
    best = [(int(step), int(head)) for step, head in zip(*np.unravel_index(order, scores.shape), strict=True)]
    share = lambda name: np.broadcast_to(found[name].positive_share(), scores.shape)  # noqa: E731
    rows = [
        [
            f"{times[step]:.4g}",
            head,
            float(scores[step, head]),
            float(share("QK")[step, head]),
            float(share("OV")[step, head]),
        ]
        for step, head in best
    ]
    shown = [
        paragraph(
            f"A text of {length} different random tokens is said twice; the score is how much a head attends from a token's second "
            f"occurrence to what followed its first. A head that attends to all alike has {even:.3f}, a perfect one 1. The "
            "paper infers induction heads from positive eigenvalues of both QK and OV; the score measures them."
        ),
        figures.as_html(
            figures.induction(scores, found["QK"], found["OV"], times, time_label(model)), "induction scores"
        ),
        table([time_label(model), "head", "score", "QK positive", "OV positive"], rows),
    ]
    print(f"induction: the best head has {scores.max():.3f}; one that attends to all alike {even:.3f}", flush=True)
    numbers = {"length": length, "even": even, "scores": scores.tolist()}
    return Section("induction", "Induction heads", "".join(shown), numbers, {"scores": scores, "times": times})


def text_pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The characters that each token adds to a text; those of several tokens come with the last of them."""
    pieces, before = [], ""
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:end])
        if end < len(ids):
            text = text.rstrip("\ufffd")  # the beginning of a character
        pieces.append(printable(text[len(before) :]))
        before = max(before, text, key=len)
    return pieces


@in_float32
def sensitivity(opened: Checkpoint, ids: list[int], num_steps: int | None = None, published: bool = False) -> Section:
    """Which tokens the last one of a text depends on, by four measures.

    Args:
        ids: of the text.
        published: pair times and states of the exponents as the authors' code does.
    """
    model = opened.model
    check_text(model, ids)
    tokens, pieces = jnp.asarray(ids), text_pieces(opened.tokenizer, ids)
    logits = model(tokens[None], weights_at(model, num_steps))[0, -1]
    target = int(jnp.argmax(logits[: opened.tokenizer.vocab_size]))
    added = lyapunov.exponents(
        model, tokens, num_steps, published=published, progress=show_progress("exponents", "steps")
    )
    derivative = lyapunov.total_derivative(model, tokens, num_steps, show_progress("total derivative", "rows"))
    sizes = np.linalg.svd(derivative, compute_uv=False)[:, 0]
    with np.errstate(divide="ignore"):
        measures = {
            "Lyapunov sensitivity: largest exponent of equation (7)": added.sum(0).max(-1),
            "total derivative: log of the largest singular value": np.log(sizes),
            "attention rollout": attention_maps.rollout(model, tokens, num_steps),
            "gradient of the prediction's log probability": attention_maps.input_gradients(
                model, tokens, target, num_steps
            ),
        }
    predicted = opened.tokenizer.decode([target])
    exception = "" if model.solver in lyapunov.OTHERS_WAIT else ", but within a step of this solver"
    shown = [
        paragraph(
            f"How the last of {len(ids)} tokens depends on each of them; the model's prediction of the next one is {predicted!r}. "
            "Equation (7) treats each token and the last one as a system of their own: its exponents are 0 for a token without "
            f"influence, and know neither of paths through other tokens nor of what becomes of the token itself{exception}; "
            "from so few steps they also depend on the order of the coordinates. All paths are in the total derivative of the last state by the first. "
            "Darker is larger, each line by itself and without the last token, which is framed."
        )
    ]
    if published:
        shown.append(paragraph("Times and states of the exponents are paired as in the authors' code."))
    for name, values in measures.items():
        shown += [paragraph(name), highlighted(pieces, values)]
        show_text(name, pieces, values)
    shown.append(figures.as_html(figures.sensitivity([repr(piece)[1:-1] for piece in pieces], measures), "sensitivity"))
    numbers = {
        "tokens": ids,
        "pieces": pieces,
        "prediction": predicted,
        "published_pairing": published,
        "measures": {name: values.tolist() for name, values in measures.items()},
    }
    return Section(
        "sensitivity",
        "Sensitivity of a token",
        "".join(shown),
        numbers,
        {"exponents": added, "derivative_sizes": sizes},
    )


@in_float32
def flow(opened: Checkpoint, ids: list[int], count: int = 32, num_steps: int | None = None) -> Section:
    """The `count` largest exponents of the flow of all tokens of a text.

    Raises:
        UserError: if the text can't be looked at, or `count` is below 1.
    """
    model, tokens = opened.model, jnp.asarray(ids)
    check_text(model, ids)
    if count < 1:
        raise UserError(f"count: must be at least 1, but it is {count}")
    largest, change = lyapunov.flow_exponents(model, tokens, count, num_steps)
    dimension = lyapunov.kaplan_yorke(largest)
    fewer = "; more of them may define it" if len(largest) < tokens.size * model.token_embedding.shape[-1] else ""
    said = f"{dimension:.3f}" if dimension is not None else f"not defined by these, whose sum is positive{fewer}"
    figure, [[axis]] = figures.new_figure(1, 1, (7, 3.4))
    axis.plot(range(1, len(largest) + 1), largest, "o-", markersize=3)
    axis.axhline(0, color="grey", linewidth=0.8)
    axis.set(title="largest exponents of the flow, over the whole depth", ylabel="exponent")
    axis.set_xlabel("rank")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)
    shown = [
        paragraph(
            f"The {len(largest)} largest exponents (equation 8, at the end of the depth) of all {tokens.size} tokens together: the logarithms by which a "
            f"small change grows over the whole depth in its fastest directions. Kaplan-Yorke dimension: {said}. Over a finite depth "
            f"that is a number of this text, not the dimension of an attractor. The last iteration changed them by at most {change:.1g}."
        ),
        figures.as_html(figure, "exponents of the flow"),
    ]
    print(f"flow: largest exponent {largest[0]:.3f}; Kaplan-Yorke dimension {said}", flush=True)
    numbers = {"exponents": largest.tolist(), "last_change": change, "kaplan_yorke_dimension": dimension}
    return Section("flow", "Exponents of the flow", "".join(shown), numbers, {"exponents": largest})


def simulations(equal_total: Sequence[str]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """For each power of the paper, the particles [T, N, 3] of the draw of `DRAWS` in which they come closest together, and the
    clustering measure [T, q] in the mean of all draws.
    """
    names = ["constant", *(f"degree {degree}" for degree in range(1, 5))]
    paths, means = {}, {}
    for degree, name in enumerate(names):
        draws = simulate(degree, equal_total=equal_total, draws=DRAWS)
        quantiles = np.stack([relative_distances(path)[0] for path in draws[:, ::SHOWN_EVERY]])
        paths[name], means[name] = draws[quantiles[:, -1, 1].argmin()], quantiles.mean(0)
    return paths, means


@in_float32
def clustering(opened: Checkpoint, ids: list[int], num_steps: int | None = None) -> Section:
    """Whether a text's tokens cluster along the model's trajectory, and particles in the paper's simulation."""
    model, tokens = opened.model, jnp.asarray(ids)
    check_text(model, ids)
    states = np.asarray(model.trajectory(tokens[None], weights_at(model, num_steps)))[:, 0]
    found, sizes = relative_distances(states)
    measures = {"states": found, "directions": relative_distances(directions(states))[0]}
    times = np.concatenate([[0.0], model.times(num_steps)])
    shown = [
        paragraph(
            "Pairwise distances of the text's tokens as shares of their root mean square, from the embedding to the last "
            "state; of the states, and of their directions x / |x|, which one token far from all others doesn't "
            "disturb. Clusters would bring the lower quantiles to 0."
        ),
        figures.as_html(figures.real_clustering(measures, sizes, times, time_label(model)), "clustering of tokens"),
        paragraph(
            "The paper's simulation, which is the same for every checkpoint: 40 particles under attention alone, 200 steps, weights constant or "
            "growing as a power of t, whose degree is named; coefficients, horizon and start are our choice. In the upper row, for each "
            f"degree, the draw of {DRAWS} that clusters most, centred and divided by its spread at every time; below, the mean of all."
        ),
    ]
    numbers = {"quantiles": QUANTILES, "rms_distance": sizes.tolist()}
    numbers |= {name: quantiles.tolist() for name, quantiles in measures.items()}
    arrays = {**measures, "rms_distance": sizes, "times": times}
    for kind, equal_total, title in (
        ("equal_end", (), "weights that end at the same size"),
        ("equal_total_of_v", ("V",), "the same integral of V over time, Q and K that end at the same size"),
        ("equal_total", ("V", "scores"), "the same integrals of V and of the scores over time"),
    ):
        paths, means = simulations(equal_total)
        of = np.linspace(0, HORIZON, len(means["constant"]))
        shown.append(figures.as_html(figures.trajectories(paths, means, of, title), "simulated particles"))
        numbers[f"simulated_{kind}"] = {name: one[-1].tolist() for name, one in means.items()}
        arrays |= {f"simulated_{kind}/{name}": one for name, one in means.items()}
        arrays |= {f"simulated_{kind}/{name}/paths": path for name, path in paths.items()}
    return Section("clustering", "Clustering", "".join(shown), numbers, arrays)
