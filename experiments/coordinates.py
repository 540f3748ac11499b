"""Coordinate checks: does one learning rate move a model by the same amount at any width, depth and E?

    python experiments/coordinates.py --block=llama     # ten steps of each shape, some minutes on two CPU cores

Each model of configs/tiny.py is trained for ten steps at a constant rate on one batch of random bytes. Shown is the
root mean square of what the steps have changed: in the kernel of attention_out, in the last state, which the final norm
brings to unit size, and in the logits. Where lines stay level, the rate carries over. The upper three rows have a
generator with generator_start=unit and base_width=96, the lower three the published one.
"""

import pathlib
import runpy

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from flax import nnx

from diffeqformer.config import check_config
from diffeqformer.training.run import make_program
from diffeqformer.transformer import weights_at

BLOCK = flags.DEFINE_enum("block", "llama", ["gpt", "llama"], "The block.")
RATE = flags.DEFINE_float("rate", 8e-3, "Learning rate.")
STEPS = flags.DEFINE_integer("steps", 10, "Steps of training.", lower_bound=1)
OUTPUT = flags.DEFINE_string("output", "runs/coordinates.png", "The picture.")
CONFIG = pathlib.Path(__file__).parents[1] / "configs" / "tiny.py"
SWEEPS = {"width": (64, 128, 256, 512), "num_steps": (2, 4, 8, 16, 32), "time_embed_dim": (4, 12, 24, 48, 96)}
MEASURED = ("kernel", "state", "logits")
UNIT = {"solver": "lie_trotter", "generator_start": "unit", "base_width": 96}


def config_of(changes: dict):
    """The config of tiny.py with changes of its model, and a constant rate."""
    config = runpy.run_path(str(CONFIG))["get_config"]("diffeqformer")
    config.update(steps=10**6, sequence_length=64)
    config.model.update({"field": BLOCK.value, "norm_of_norm": False, "generator_start": "published"} | changes)
    config.model.update(heads=config.model.width // 32, mlp=4 * config.model.width)
    config.optimizer.update(learning_rate=RATE.value, warmup_fraction=0.0, epsilon=1e-12)
    check_config(config, 1)
    return config


def changed(changes: dict) -> np.ndarray:
    """The root mean squares of the changes of what is `MEASURED`, after each step: [steps, measured]."""
    config = config_of(changes)
    program = make_program(config)
    state = program.init()
    tokens = np.random.RandomState(0).randint(256, size=(8, 64)).astype(np.int32)

    @jax.jit
    def measure(params):
        model = nnx.merge(program.graph, params)
        weights = weights_at(model)
        last = model.trajectory(jnp.asarray(tokens), weights)[-1]
        return weights.layers["attention_out"]["kernel"], model.normalize(last), model.head(last)

    first, found = measure(state["params"]), []
    for _ in range(STEPS.value):
        state, _ = program.train_step(state, tokens)
        now = measure(state["params"])
        found.append([float(jnp.sqrt(jnp.mean((a - b) ** 2))) for a, b in zip(now, first)])
    return np.array(found)


def main(_) -> None:
    logging.set_verbosity(logging.ERROR)  # optax says that a rate is constant
    from diffeqformer.console.figures import new_figure

    figure, panels = new_figure(2 * len(MEASURED), len(SWEEPS), (4 * len(SWEEPS), 5 * len(MEASURED)))
    for row, form in enumerate((UNIT, {"solver": "lie_trotter"})):
        for column, (name, values) in enumerate(SWEEPS.items()):
            found = np.array([changed(form | {name: value}) for value in values])  # [values, steps, measured]
            for index, measured in enumerate(MEASURED):
                panel = panels[len(MEASURED) * row + index][column]
                for step in sorted({0, 1, 3, STEPS.value - 1} & set(range(STEPS.value))):
                    panel.plot(values, found[:, step, index], "o-", label=f"step {step + 1}")
                panel.set(xscale="log", yscale="log", xlabel=name, ylabel=f"change of {measured}")
                panel.set_xticks(values, labels=list(map(str, values)))
                panel.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
                panel.legend(fontsize=7)
                print(row, name, measured, np.round(found[:, -1, index], 4), flush=True)
    path = pathlib.Path(OUTPUT.value)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    app.run(main)
