"""A small byte-level model of Python source code: nothing to download, some minutes on two CPU cores.

    python -m diffeqformer.main --config=configs/tiny.py                 # the recipe of docs/recipe.md
    python -m diffeqformer.main --config=configs/tiny.py:diffeqformer    # as published; :gpt and :llama are baselines
    python -m diffeqformer.main --config=configs/tiny.py:elastic         # the recipe for 2 to 8 steps of depth

The text is Python's own standard library. Shape, schedule and rates were chosen by hand for that time;
experiments/ablations.py tunes rates.

What to expect, with the first command and Python 3.11.7: about 1.7 bits/byte on the validation split after 5,000 steps,
in twelve minutes on two cores of an Intel Xeon. docs/results.md compares :diffeqformer with :gpt and :shared.
"""

from diffeqformer.config import as_recipe, base_config

LEARNING_RATES = {"recipe": 8e-3, "elastic": 8e-3, "shared": 5e-3}  # of the others 3e-3


def get_config(model: str = "recipe"):
    elastic = model == "elastic"
    config = base_config("tiny", "recipe" if elastic else model)
    config.name = "tiny" if model == "recipe" else f"tiny-{model}"
    config.steps = 5000
    config.batch_size = 8
    config.sequence_length = 128
    config.model.update(
        width=96,
        heads=4,
        mlp=384,
        num_steps=8 if elastic else 4,
        vocab_size=257,  # bytes and end-of-text
        max_length=128,
        time_embed_dim=24,
        sinusoidal_dim=32,
        generator_start="constant",
        dropout=0.0,  # no byte is seen twice
        dtype="float32",
        remat="step",  # less memory
    )
    config.optimizer.learning_rate = LEARNING_RATES.get(model, 3e-3)
    config.optimizer.beta2 = 0.95
    config.optimizer.warmup_fraction = 0.05
    config.data.task = "python_stdlib"
    config.data.tokenizer = "bytes"
    config.log_every = 100
    config.eval_every = 1000
    config.checkpoint_every = 500
    config.sample.prompt = "def "
    if elastic:
        config.model.training_depths = "2,3,4,6,8"  # see docs/elastic.md
    return as_recipe(config) if model in ("recipe", "elastic") else config
