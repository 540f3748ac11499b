"""GPT-small's shape on WikiText-103: 768 wide, 12 steps, E = 20 (188 M parameters; GPT 124 M).

    python -m diffeqformer.main --config=configs/wikitext103_small.py     # :gpt and :shared are the baselines

Hardware: one TPU v5e chip (7 to 9 hours, modelled) or one GPU with 24 GB (by its memory alone), with
--config.microbatches=0; docs/reproduce.md has the commands. Or 8 GPUs or TPU chips. Each of 8 devices holds the
embeddings and an eighth of the hypernetwork with their Adam moments, 0.7 GB, and what its part of the batch needs.
Hyperparameters: the authors' published configuration.
What to expect: not run.

The corpus, about 0.5 GB of detokenized text, is downloaded at the first start.
"""

from diffeqformer.config import as_recipe, base_config


def get_config(model: str = "diffeqformer"):
    config = base_config("wikitext103_small", model)
    config.steps = 10_001
    config.batch_size = 256
    config.microbatches = 8  # of 4 sequences on each of 8 devices
    config.model.update(vocab_multiple=128, remat="products")
    config.data.task = "wikitext103"
    return as_recipe(config) if model == "recipe" else config
