"""GPT-small's shape on OpenWebText: 768 wide, 12 steps, E = 20 (188 M parameters; GPT 124 M).

    python -m diffeqformer.main --config=configs/small.py            # :gpt and :shared are the baselines

Hardware: 8 GPUs or TPU chips (the authors used two A100 with 80 GB). Each device holds the
embeddings and an eighth of the hypernetwork with their Adam moments, 0.7 GB, and what its part of the batch needs.
One TPU v5e chip does, too, in 28 to 34 hours, modelled, with --config.microbatches=0.
Hyperparameters: the authors' published configuration.
What to expect: not run, except for single steps at batch 1 on a CPU.

The corpus, about 40 GB of text, is downloaded and prepared at the first start. `python -m diffeqformer.prepare` with
the same --config does that beforehand.
"""

from diffeqformer.config import as_recipe, base_config


def get_config(model: str = "diffeqformer"):
    config = base_config("small", model)  # its defaults are this configuration
    config.microbatches = 16  # of 4 sequences on each of 8 devices
    config.model.update(vocab_multiple=128, remat="products")
    return as_recipe(config) if model == "recipe" else config
